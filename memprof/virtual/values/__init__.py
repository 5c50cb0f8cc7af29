"""Values of a dry run that are those of a real one: small integers and masks, and a few random numbers."""
