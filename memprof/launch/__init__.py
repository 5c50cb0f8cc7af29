"""Starts a job under the recorder, monitors it from outside, and packs the recording."""
