"""Re-enacts a step: what is alive at each operator."""
