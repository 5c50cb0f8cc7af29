"""Makes thread pools work in a dry run: torch's modes are per thread, and one thread at a time computes shapes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from functools import wraps
from typing import Any

import torch
from torch._guards import active_fake_mode

#: Timeout for a task. Tasks that run as long as the job are left running after it.
_PATIENCE_S = 5.0


def follow_pools() -> None:
    """Makes tasks submitted to a pool compute shapes as well, each finishing before the next begins.

    Libraries read files this way: transformers and diffusers load weights in thread pools.
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
    """Runs a task with a mode active in its thread."""
    torch._C._set_dispatch_mode(mode)
    try:
        return task(*args, **kwargs)
    finally:
        torch._C._unset_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
