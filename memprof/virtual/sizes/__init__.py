"""Sizes that shapes do not determine: of results that depend on values, and of what kernels take."""
