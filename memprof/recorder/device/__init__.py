"""What the recorder hears and asks of devices with memory of their own: CUDA's, and those that look like them."""
