"""The pages of `memprof history` and `memprof bisect`."""
