"""Splits each batch into micro-batches whose gradients add up before one update."""
