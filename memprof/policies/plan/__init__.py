"""Plans: policies in their order, their files, and what they promise."""
