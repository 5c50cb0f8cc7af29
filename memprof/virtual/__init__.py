"""A simulated machine: a job runs on tensors without data, so that the recorder sees a step without any computation."""
