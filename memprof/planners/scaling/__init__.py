"""A step at another size than it was recorded at: another batch, another sequence length."""
