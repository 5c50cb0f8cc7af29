"""Enforces a memory budget by dropping saved tensors and recomputing them, operator by operator."""
