"""Search for the fastest plan whose peak is within a budget."""
