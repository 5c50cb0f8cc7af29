"""Ends a dry run at what lays gradients into memory of its own, past torch's operators: DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

from torch.nn.parallel import DistributedDataParallel


def refuse_replicas(refuse: Callable[[str], NoReturn]) -> None:
    """Has the wrapper say that it cannot be dry-run, where it would end the job with an error of torch's.

    Args:
        refuse: Ends the job with a sentence.
    """
    wrapper: Any = DistributedDataParallel
    original = wrapper.__init__

    @wraps(original)
    def init(*_: Any, **__: Any) -> None:
        refuse(
            "torch.nn.parallel.DistributedDataParallel cannot be dry-run: it copies gradients past torch's operators, "
            "into buckets of as many bytes. Start the job without it, and ask for its ranks with --shard ddp:N."
        )

    wrapper.__init__ = init
