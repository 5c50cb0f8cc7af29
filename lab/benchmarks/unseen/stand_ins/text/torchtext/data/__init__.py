"""Where torchtext keeps its tokenizers."""
