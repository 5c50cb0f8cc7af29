"""A model of torch's CUDA caching allocator: the segments a sequence of requests makes it reserve."""
