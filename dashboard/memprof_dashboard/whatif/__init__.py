"""The what-if page: searches for plans, and what they found."""
