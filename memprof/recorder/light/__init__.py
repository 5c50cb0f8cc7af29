"""Observes a whole run at a few per cent: no dispatch mode, allocations heard in short stretches, counts in between."""
