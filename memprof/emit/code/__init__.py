"""Python code for each policy that depends only on torch."""
