"""Makes a job fit a budget from within its process, during training."""
