"""Drops what chosen modules save for backward, and runs their forward again when backward needs it."""
