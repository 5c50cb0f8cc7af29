"""Exports recordings in the formats of other tools, and without identifying data."""
