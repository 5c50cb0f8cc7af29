"""Searches for the fastest arrangement of a job over many devices: data, tensor, pipeline, context and experts."""
