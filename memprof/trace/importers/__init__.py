"""Imports memory snapshots and profiler traces as traces; file content is never executed."""
