"""Identifies the caller of an operator: modules, Python stacks, and torch functions that call back into the job."""
