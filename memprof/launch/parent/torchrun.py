"""Starts a script once for each rank of a plan, through torchrun."""

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
    """Returns how many ranks a plan divides its job over; 1 where it does not.

    Raises:
        CannotStartError: The plan shards twice, over different numbers.
    """
    sizes = {getattr(policy, "world_size", 1) for policy in plan.policies} if plan is not None else set()
    sizes -= {1}
    if len(sizes) > 1:
        raise CannotStartError(f"The plan shards over {' and '.join(map(str, sorted(sizes)))} ranks: leave one out.")
    return sizes.pop() if sizes else 1


def on_ranks(target: Target, ranks: int, environment: Mapping[str, str]) -> Target:
    """Returns the job of a script or module that runs once a rank.

    Args:
        target: What the user named. A command of the user's own is left alone: torchrun, srun or another launcher.
        ranks: Ranks of the plan.
        environment: Where this process is a rank itself, whoever started it has started the others.
    """
    is_python = target.arguments[0] == sys.executable and target.name in target.arguments[1:3]
    if ranks == 1 or not is_python or "WORLD_SIZE" in environment:
        return target
    return replace(target, arguments=(sys.executable, *_TORCHRUN, str(ranks), *target.arguments[1:]))


def threads_of(ranks: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable by which ranks share the cores, which torchrun would set to 1 and say so at length."""
    if ranks == 1 or "OMP_NUM_THREADS" in environment:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}


def first_of(ranks: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which torchrun tells a process that it is the first of so many, for a dry run of it."""
    if ranks == 1 or "WORLD_SIZE" in environment:
        return {}
    own = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
    count = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    return {**own, **count, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
