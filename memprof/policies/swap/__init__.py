"""Moves saved tensors, or optimizer state or parameters, out of the device while nobody needs them."""
