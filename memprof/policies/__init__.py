"""Policies: techniques that change what a step costs, each predicted from a recorded step and applied for real."""
