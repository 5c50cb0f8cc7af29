"""Transformer Engine without a GPU: its compiled extension, as rules of what each operator allocates."""
