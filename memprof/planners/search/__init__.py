"""Search of the whole policy space for the fastest combination that fits a budget."""
