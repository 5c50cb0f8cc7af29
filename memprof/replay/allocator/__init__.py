"""A model of torch's CUDA caching allocator: the segments it reserves for a sequence of requests."""
