"""The trace format: its tables, its file, and single steps cut from it."""
