"""Sharding as predicted: which rank holds what, when, and what collectives take."""
