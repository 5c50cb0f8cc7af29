"""Analyses of recorded steps: breakdowns, peaks, saved tensors, recompute costs."""
