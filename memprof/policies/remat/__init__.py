"""Holds a budget of bytes: saved tensors are dropped and made again, operator by operator."""
