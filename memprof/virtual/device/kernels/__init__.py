"""What CUDA kernels take and return on the device of a dry run."""
