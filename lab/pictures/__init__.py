"""The pictures of the README and the documentation, made from real recordings: `make pictures`."""
