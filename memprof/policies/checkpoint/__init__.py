"""Drops tensors that chosen modules save for backward, and recomputes their forward in backward."""
