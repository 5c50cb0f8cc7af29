"""Verbs that find, apply, write and check plans."""
