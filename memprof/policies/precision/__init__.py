"""Runs forward and loss in a shorter floating point type, by autocast or with weights of that type."""
