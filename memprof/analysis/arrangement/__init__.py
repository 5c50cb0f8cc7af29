"""Arrangements of a job over many devices."""
