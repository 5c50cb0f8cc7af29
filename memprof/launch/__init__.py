"""Starts a job so that it is recorded, watches it from outside, and packs what it left."""
