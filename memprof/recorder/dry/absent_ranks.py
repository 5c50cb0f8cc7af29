"""Makes a dry run one rank of several: the others do not exist, and nothing is sent to them."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

import torch


def allow_missing_ranks() -> None:
    """Makes the job's process groups consist of this process alone, whatever their world size.

    Every collective completes at once. Its tensors have their real sizes, and their values are never read.
    """
    if not torch.distributed.is_available():
        return
    groups: Any = torch.distributed.distributed_c10d
    original = groups.init_process_group

    @wraps(original)
    def init(backend: Any = None, *_: Any, rank: int = -1, world_size: int = -1, **__: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # lazy: most jobs create no group

        rank = rank if rank >= 0 else int(os.environ.get("RANK", "0"))
        world_size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
        original("fake", rank=rank, world_size=world_size, store=FakeStore())

    groups.init_process_group = init
    distributed: Any = torch.distributed
    distributed.init_process_group = init
