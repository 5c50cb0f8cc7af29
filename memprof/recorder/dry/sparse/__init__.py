"""Dry runs of sparse tensors."""
