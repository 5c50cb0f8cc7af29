"""Recordings as files and folders: written whole, read within bounds."""
