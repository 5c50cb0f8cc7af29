"""Recordings in the formats of other tools, and without what identifies their owner."""
