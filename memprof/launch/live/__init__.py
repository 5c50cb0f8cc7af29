"""Makes a job fit a budget from inside it, while it trains."""
