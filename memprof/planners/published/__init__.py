"""Planners from published papers, one file or folder each."""
