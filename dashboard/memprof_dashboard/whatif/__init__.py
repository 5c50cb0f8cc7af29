"""The what-if page: plan searches and their results."""
