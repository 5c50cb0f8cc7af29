"""Finds which process of a distributed job this is, from torch itself or from whatever started the job."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memprof.trace.launchers import rank_in


def find_rank(environment: Mapping[str, str]) -> tuple[int, int]:
    """Returns the rank of this process and the number of processes of the job; 0 of 1 for a job of one.

    The job's own process group goes before the environment: a script that starts its processes itself tells only that.
    """
    told = _of_process_group()
    return told if told is not None else rank_in(environment)


def describe_place() -> dict[str, Any]:
    """Returns which machine this is and whose clock it reads."""
    return {"node": platform.node(), "clock": _clock()}


def _of_process_group() -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")
    # A torch that was built without it has the module too.
    if distributed is None or not getattr(distributed, "is_initialized", bool)():
        return None
    return int(distributed.get_rank()), int(distributed.get_world_size())


def _clock() -> str:
    """Identifies the running system, whose clock containers share with it; the machine's name where it is not told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()[:13]
    except (OSError, ValueError):
        return platform.node()
