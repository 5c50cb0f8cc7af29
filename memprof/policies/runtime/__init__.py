"""What policies change a running job with."""
