"""Recordings as files and folders: written atomically, read within hard limits."""
