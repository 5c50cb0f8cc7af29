"""Search for plans: the least time whose peak is within a budget."""
