"""Compiled regions: where the code that inductor generates comes from, and what it allocates in a real run."""
