"""A device that is not there: the job sees CUDA, and what torch would do on it is dry-run."""
