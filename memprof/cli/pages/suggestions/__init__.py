"""Pages of `memprof suggest` for recordings that are less than a whole recorded step."""
