"""Tensors without data: how torch makes, converts, saves and shares them, and those of sparse layouts."""
