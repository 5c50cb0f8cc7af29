"""Finds the rank of this process in a distributed job, from torch itself or from the launcher's environment.

A DataLoader's worker has no rank.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memprof.trace.launchers import rank_in


def find_rank(environment: Mapping[str, str]) -> tuple[int, int]:
    """Returns the rank of this process and the world size; (0, 1) for a single-process job.

    The process group takes precedence over the environment: it is all that a script starting its own processes sets.
    """
    given = _of_process_group()
    return given if given is not None else rank_in(environment)


def is_loader_worker() -> bool:
    """Returns whether this process is a DataLoader's worker.

    Its modules are transforms of the data set, such as torchvision's, and are no model's.
    """
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def describe_place() -> dict[str, Any]:
    """Returns the machine's identity and the clock it uses."""
    return {"node": platform.node(), "clock": _clock()}


def _of_process_group() -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")
    # A torch built without distributed support still has the module.
    if distributed is None or not getattr(distributed, "is_initialized", bool)():
        return None
    return int(distributed.get_rank()), int(distributed.get_world_size())


def _clock() -> str:
    """Identifies the running system, whose clock its containers share; the machine's name if unavailable."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()[:13]
    except (OSError, ValueError):
        return platform.node()
