"""A small data-parallel job whose ranks have batches of different sizes; run by torchrun for the picture of ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    """Trains four steps."""
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.LayerNorm(256)) for _ in range(6)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*blocks))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(512 + 96 * rank, 256)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


main()
