"""What training scripts of several tests begin with, as text."""

from __future__ import annotations

_BLOCKS = """
import sys, torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.narrow(torch.relu(self.wide(x)))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range({count})))
    def forward(self, x):
        return self.layers(x)
"""


def net_of_blocks(count: int) -> str:
    """Returns the source of a model, ``Net``, whose ``layers`` are blocks that keep about 2 KiB a sample each."""
    return _BLOCKS.replace("{count}", str(count))
