"""Dry runs of the job under a plan, apart from its files and its network."""
