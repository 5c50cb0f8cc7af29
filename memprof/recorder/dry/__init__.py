"""Runs a job on fake tensors, so that the recorder sees a step without any computation."""
