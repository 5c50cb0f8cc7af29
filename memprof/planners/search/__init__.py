"""Search of the whole policy space: which policies together fit a budget in the least time."""
