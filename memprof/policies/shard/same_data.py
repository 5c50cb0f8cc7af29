"""Detects that all ranks draw the same data, which duplicates work."""

from __future__ import annotations

import random
import zlib

import torch
import torch.distributed as dist

SENTENCE = (
    "All ranks draw the same random numbers, and no DataLoader feeds the model: if the script draws its batches "
    "itself, all ranks train on the same ones. Read from a DataLoader, whose batches are sharded, or add the "
    "environment's RANK to the seed."
)


def draws_alike(device: torch.device) -> bool:
    """Returns whether torch and Python will draw the same numbers on all ranks from here on."""
    state = bytes(torch.get_rng_state().tolist()) + repr(random.getstate()).encode()
    own = zlib.crc32(state)
    low, high = (torch.tensor(own, dtype=torch.int64, device=device) for _ in range(2))
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return bool(low == high)
