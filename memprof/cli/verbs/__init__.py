"""One file per verb: each parses its options, makes one call and prints the result."""
