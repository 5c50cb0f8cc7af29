"""One file per verb: each parses, makes one call and prints."""
