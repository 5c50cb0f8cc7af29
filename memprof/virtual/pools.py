"""Makes other threads and processes that a job starts work in a dry run.

torch's modes are per thread, and one thread at a time computes shapes; a DataLoader's workers load real data.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.data import DataLoader, dataloader
from torch.utils.data._utils import worker

#: Timeout for a task. Tasks that run as long as the job are left running after it.
_PATIENCE_S = 5.0


def follow_pools(device_calls: AbstractContextManager[Any]) -> None:
    """Makes tasks submitted to a pool compute shapes as well, each finishing before the next begins.

    Libraries read files this way: transformers and diffusers load weights in thread pools.

    Args:
        device_calls: What a thread enters to see a virtual device.
    """
    pools: Any = ThreadPoolExecutor
    submit = pools.submit

    @wraps(submit)
    def hand_over(pool: Any, task: Any, /, *args: Any, **kwargs: Any) -> Any:
        mode = active_fake_mode()
        if mode is None:
            return submit(pool, task, *args, **kwargs)
        future = submit(pool, _in_mode, mode, device_calls, task, *args, **kwargs)
        wait([future], timeout=_PATIENCE_S)
        return future

    pools.submit = hand_over


def load_real_data(leave: Callable[[], None]) -> None:
    """Makes data loaders load real data.

    Args:
        leave: Ends the dry run in a worker. It has begun there where the worker was not forked and the script that it
            imports first creates a module.
    """
    for owner, name in ((DataLoader, "__iter__"), (dataloader._BaseDataLoaderIter, "__next__")):
        original = getattr(owner, name)

        def load(this: Any, original: Any = original) -> Any:
            with unset_fake_temporarily():
                return original(this)

        setattr(owner, name, wraps(original)(load))
    workers: Any = worker
    loop = workers._worker_loop

    @wraps(loop)
    def run(*args: Any, **kwargs: Any) -> Any:
        leave()
        return loop(*args, **kwargs)

    workers._worker_loop = run


def _in_mode(mode: Any, device_calls: AbstractContextManager[Any], task: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Runs a task with a mode active in its thread, and with the device in sight."""
    torch._C._set_dispatch_mode(mode)
    try:
        with device_calls:
            return task(*args, **kwargs)
    finally:
        torch._C._unset_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
