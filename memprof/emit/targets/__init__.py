"""The targets, one per file."""
