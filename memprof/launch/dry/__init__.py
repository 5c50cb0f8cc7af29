"""Dry runs of the job under a plan, isolated from its files and its network."""
