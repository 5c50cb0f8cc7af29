"""Compiles the regions of a dry run as a real run does, and runs their code without kernels."""
