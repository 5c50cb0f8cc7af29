"""The planners that papers describe, one file or folder each."""
