"""A step at another size than recorded: another batch size or sequence length."""
