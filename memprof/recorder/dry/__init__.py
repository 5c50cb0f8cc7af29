"""Runs a job on tensors without memory, so that the recorder sees a step that nobody computes."""
