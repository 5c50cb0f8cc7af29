"""Writes a recording in the formats of other tools."""
