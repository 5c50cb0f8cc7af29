"""Keeps saved activations of chosen modules in 8 bits."""
