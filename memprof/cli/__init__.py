"""The command line: one file per verb, each of which parses, makes one call and prints."""
