"""Changes how the optimizer works: its state in 8 bits, its loop over parameters, when it updates."""
