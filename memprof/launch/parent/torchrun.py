"""Starts a script once per rank of a plan, through torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from memprof.launch.parent.target import CannotStartError, Target

if TYPE_CHECKING:
    from memprof.policies.plan.plan import Plan

_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def ranks_of(plan: Plan | None) -> int:
    """Returns the number of ranks that a plan shards its job over; 1 if it does not.

    Raises:
        CannotStartError: The plan shards twice, over different numbers of ranks.
    """
    sizes = {getattr(policy, "world_size", 1) for policy in plan.policies} if plan is not None else set()
    sizes -= {1}
    if len(sizes) > 1:
        raise CannotStartError(f"The plan shards over {' and '.join(map(str, sorted(sizes)))} ranks: leave one out.")
    return sizes.pop() if sizes else 1


def on_ranks(target: Target, ranks: int, environment: Mapping[str, str]) -> Target:
    """Returns the job that runs a script or module once per rank.

    Args:
        target: The user's target. A command is left unchanged: it is torchrun, srun or another launcher.
        ranks: Ranks of the plan.
        environment: The environment; if it marks this process as a rank, the other ranks are already started.
    """
    is_python = target.arguments[0] == sys.executable and target.name in target.arguments[1:3]
    if ranks == 1 or not is_python or "WORLD_SIZE" in environment:
        return target
    return replace(target, arguments=(sys.executable, *_TORCHRUN, str(ranks), *target.arguments[1:]))


def threads_of(ranks: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns OMP_NUM_THREADS, dividing the cores among ranks; torchrun would set it to 1 with a long warning."""
    if ranks == 1 or "OMP_NUM_THREADS" in environment:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}


def first_of(ranks: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns torchrun's variables for rank 0 of the given number of ranks, for a dry run of it."""
    if ranks == 1 or "WORLD_SIZE" in environment:
        return {}
    own = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
    count = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    return {**own, **count, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
