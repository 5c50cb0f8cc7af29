"""Moves what lives through all steps: optimizer state and parameters."""
