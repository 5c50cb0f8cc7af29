"""Builds storages from allocation events: lifetimes and categories."""
