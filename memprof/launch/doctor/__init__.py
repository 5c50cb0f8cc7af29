"""Whether recording works in this environment, and what prevents it."""
