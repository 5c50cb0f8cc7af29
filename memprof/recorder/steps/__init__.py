"""Step boundaries, and which steps are recorded."""
