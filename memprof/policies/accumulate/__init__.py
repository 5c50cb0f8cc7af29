"""Splits each batch into micro-batches and accumulates their gradients before one update."""
