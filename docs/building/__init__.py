"""What builds the documentation: generated pages, and commands that are really run."""
