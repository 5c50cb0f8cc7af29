"""Runs a job until a plan is measured to fit a budget."""
