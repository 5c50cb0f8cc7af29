"""A virtual device: the job sees CUDA, and torch's work on it is dry-run."""
