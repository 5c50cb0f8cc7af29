"""A stand-in for torchtext, which no longer installs: sentences of random words in two made-up languages."""
