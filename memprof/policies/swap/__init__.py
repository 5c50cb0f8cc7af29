"""Moves saved tensors, optimizer state or parameters out of the device while they are not needed."""
