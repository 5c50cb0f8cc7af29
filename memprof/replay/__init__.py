"""Replays a step: live bytes at each operator."""
