"""memprof's own sessions of torch's profiler, and the libraries below it."""
