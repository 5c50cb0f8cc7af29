"""What a trace is: its tables, its file, and the step cut out of it."""
