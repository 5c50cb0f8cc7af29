"""Plans for a recorded job: search, prediction, and comparison with runs."""
