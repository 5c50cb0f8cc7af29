"""Trains ResNet-50 under float16 autocast on a batch of 256."""

import torch
from families.resnet50 import classify

if __name__ == "__main__":
    classify(batch=256, precision=torch.float16)
