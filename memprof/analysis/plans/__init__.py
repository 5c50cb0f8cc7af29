"""Plans for a recorded job: found, predicted, and compared with runs."""
