"""Categories and owners of memory, and failed allocations."""
