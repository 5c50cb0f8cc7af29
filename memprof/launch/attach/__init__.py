"""Attaching to a job that is running, without a restart."""
