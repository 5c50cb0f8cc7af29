"""Runs forward and loss in a lower-precision floating point type, under autocast or with weights of that type."""
