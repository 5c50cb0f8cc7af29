"""The host memory of a job's processes."""
