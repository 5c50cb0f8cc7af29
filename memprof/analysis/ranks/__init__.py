"""Comparison of the ranks of one job."""
