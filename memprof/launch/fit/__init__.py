"""Runs a job until a plan is found under which it was measured to fit a budget."""
