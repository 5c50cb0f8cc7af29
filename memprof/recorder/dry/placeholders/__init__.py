"""Placeholders where Python or torch reads a value without an operator, or asserts one."""
