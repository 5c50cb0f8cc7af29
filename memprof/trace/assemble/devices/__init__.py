"""Data that a device's allocator, driver and kernels add to a recording."""
