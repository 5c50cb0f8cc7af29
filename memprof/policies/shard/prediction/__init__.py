"""Predicts sharding: what each rank holds and when, and the duration of collectives."""
