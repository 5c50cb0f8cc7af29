"""Memory that grows over steps: how much, which tensors, and what holds them."""
