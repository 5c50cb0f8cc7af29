"""Has thread pools work in a dry run: torch's modes are of one thread, and shapes are made by one at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from functools import wraps
from typing import Any

import torch
from torch._guards import active_fake_mode

#: How long a task is waited for. Tasks that run for as long as the job does are left to themselves after that.
_PATIENCE_S = 5.0


def follow_pools() -> None:
    """Has tasks that a dry run hands to a pool make shapes as well, each before the next one begins.

    Libraries read files so: transformers and diffusers load weights in pools of threads.
    """
    pools: Any = ThreadPoolExecutor
    submit = pools.submit

    @wraps(submit)
    def hand_over(pool: Any, task: Any, /, *args: Any, **kwargs: Any) -> Any:
        mode = active_fake_mode()
        if mode is None:
            return submit(pool, task, *args, **kwargs)
        future = submit(pool, _in_mode, mode, task, *args, **kwargs)
        wait([future], timeout=_PATIENCE_S)
        return future

    pools.submit = hand_over


def _in_mode(mode: Any, task: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Runs a task with a mode in force in its thread."""
    torch._C._set_dispatch_mode(mode)
    try:
        return task(*args, **kwargs)
    finally:
        torch._C._unset_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
