"""Compiles chosen modules, with a budget for the activations they save."""
