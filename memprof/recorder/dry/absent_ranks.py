"""Lets a dry run be one rank of several: the others are not there, and nothing is sent to them."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

import torch


def join_nobody() -> None:
    """Has the process groups that a job makes consist of this process alone, whatever number of ranks they are of.

    Every collective is over at once. Its tensors are as long as ever, and nobody looks at what is in them.
    """
    if not torch.distributed.is_available():
        return
    groups: Any = torch.distributed.distributed_c10d
    original = groups.init_process_group

    @wraps(original)
    def init(backend: Any = None, *_: Any, rank: int = -1, world_size: int = -1, **__: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # at use: most jobs make no group

        rank = rank if rank >= 0 else int(os.environ.get("RANK", "0"))
        world_size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
        original("fake", rank=rank, world_size=world_size, store=FakeStore())

    groups.init_process_group = init
    distributed: Any = torch.distributed
    distributed.init_process_group = init
