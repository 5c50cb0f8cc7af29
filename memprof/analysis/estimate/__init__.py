"""Training memory by published formulas, from a model's shape alone, each with its source."""
