"""What each policy comes to in Python code that needs torch alone."""
