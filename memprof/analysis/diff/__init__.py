"""Differences between two recordings, summaries as baselines, and the gates that guard them."""
