"""Optimizers and their state."""
