"""The post-mortem of a job that ran out of memory."""
