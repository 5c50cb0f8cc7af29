"""Workspaces of convolutions as cuDNN's own heuristics give them, asked on a machine without a GPU."""
