"""What can be recorded in this environment, and what stands in the way."""
