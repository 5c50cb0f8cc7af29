"""What memory is for, who holds it, and requests that failed."""
