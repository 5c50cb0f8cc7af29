"""The forms a plan is written in, one a file."""
