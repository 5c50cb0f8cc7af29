"""Dry runs of a job at the commits of its repository."""
