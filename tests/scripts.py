"""What training scripts of several tests begin with, as text."""

from __future__ import annotations

_NET = """
import sys, torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        {members}
    def forward(self, x):
        return {result}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range({count})))
    def forward(self, x):
        return self.layers(x)
"""


def net_of_blocks(
    count: int,
    members: str = "self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)",
    result: str = "x + self.narrow(torch.relu(self.wide(x)))",
) -> str:
    """Returns the source of a model, ``Net``, whose ``layers`` are blocks.

    Args:
        count: How many.
        members: A statement that gives a block its layers.
        result: What a block returns for ``x``; by default it keeps about 2 KiB a sample.
    """
    return _NET.format(count=count, members=members, result=result)
