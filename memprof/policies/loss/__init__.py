"""Computes cross-entropy over a few rows of the logits at a time."""
