"""The memory of a job over the commits of its repository."""
