"""Memory and speed of accelerators, from vendors' data sheets."""
