"""Reads devices with memory of their own: CUDA's, and those with the same interface."""
