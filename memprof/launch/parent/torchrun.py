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

#: Maximum number of ranks of a dry run.
MOST_RANKS = 1024
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


def check_ranks(
    target: Target, ranks: int, nodes: int, plan_ranks: int, environment: Mapping[str, str], *, dry_run: bool
) -> None:
    """Rejects ranks that a dry run cannot start.

    Args:
        target: The user's target.
        ranks: Ranks of the job; 0 if not given.
        nodes: Machines, each with the same number of ranks.
        plan_ranks: Ranks of the plan; 1 if it shards nothing.
        environment: The environment, which may mark this process as a rank.
        dry_run: Whether the job is dry-run.

    Raises:
        CannotStartError: With the reason.
    """
    if not dry_run:
        raise CannotStartError("--ranks and --nodes are for dry runs: add --dry-run, or start the ranks with torchrun.")
    if not ranks:
        raise CannotStartError("--nodes divides --ranks among machines: add --ranks 64.")
    if ranks > MOST_RANKS:
        raise CannotStartError(f"--ranks {ranks:,} exceeds the maximum of {MOST_RANKS:,}.")
    if ranks % nodes:
        raise CannotStartError(f"{ranks:,} ranks cannot be divided evenly among {nodes:,} nodes.")
    if plan_ranks > 1:
        raise CannotStartError(
            "--ranks is for distributed scripts, and --shard for scripts that are not: leave one out."
        )
    if "WORLD_SIZE" in environment:
        raise CannotStartError("WORLD_SIZE is set: this process is a rank already. Leave out --ranks, or unset it.")
    if not _is_python(target):
        raise CannotStartError(f"--ranks starts the ranks itself: name the script in place of {target.arguments[0]}.")


def _is_python(target: Target) -> bool:
    """Whether a target is a script or a module, rather than a command."""
    return target.arguments[0] == sys.executable and target.name in target.arguments[1:3]


def on_ranks(target: Target, ranks: int, environment: Mapping[str, str]) -> Target:
    """Returns the job that runs a script or module once per rank.

    Args:
        target: The user's target. A command is left unchanged: it is torchrun, srun or another launcher.
        ranks: Ranks of the plan.
        environment: The environment; if it marks this process as a rank, the other ranks are already started.
    """
    if ranks == 1 or not _is_python(target) or "WORLD_SIZE" in environment:
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
