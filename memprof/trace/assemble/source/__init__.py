"""What the source code around recorded operators tells that the operators do not."""
