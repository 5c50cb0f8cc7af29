"""Ends a dry run at DistributedDataParallel, which copies gradients to its own memory without torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

from torch.nn.parallel import DistributedDataParallel


def refuse_replicas(refuse: Callable[[str], NoReturn]) -> None:
    """Makes the wrapper report that it cannot be dry-run, instead of failing with an error of torch's.

    Args:
        refuse: Ends the job with a message.
    """
    wrapper: Any = DistributedDataParallel
    original = wrapper.__init__

    @wraps(original)
    def init(*_: Any, **__: Any) -> None:
        refuse(
            "torch.nn.parallel.DistributedDataParallel cannot be dry-run: it copies gradients without torch's "
            "operators, into buckets of the same size. Start the job without it; simulate its ranks with --shard ddp:N."
        )

    wrapper.__init__ = init
