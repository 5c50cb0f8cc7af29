"""What imported allocations are for."""
