"""Sets options of the CUDA caching allocator in the environment of the job."""
