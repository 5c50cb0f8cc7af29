"""Tools to change a running job."""
