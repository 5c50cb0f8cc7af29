"""Writes a plan as PyTorch code, or as the configuration of another trainer."""
