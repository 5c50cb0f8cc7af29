"""The ranks of one job side by side."""
