"""Eviction by Dynamic Tensor Rematerialization: one rule for the planner dtr, and remat's prediction and runtime."""
