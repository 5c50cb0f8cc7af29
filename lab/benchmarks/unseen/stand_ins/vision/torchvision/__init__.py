"""A stand-in for torchvision, where it cannot be installed: random images, and the few names that the scripts use."""

from torchvision import datasets, models, transforms, utils

__all__ = ["datasets", "models", "transforms", "utils"]
