"""Shards an unmodified training job over the ranks started by torchrun."""

from __future__ import annotations

import os
import random
import zlib
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from memprof.errors import PolicyError
from memprof.policies.runtime.own_types import is_dry_run
from memprof.policies.shard.averaging import Averaging
from memprof.policies.shard.feed import RankFeed, divide, feed_of
from memprof.policies.shard.full import check_units, shard_fully, units_of
from memprof.policies.shard.process_group import choose_device, join_ranks, start_alike
from memprof.policies.shard.states import DividedUpdates, check_elementwise

if TYPE_CHECKING:
    from memprof.policies.runtime.job import Job
    from memprof.policies.shard.policy import Shard

#: Wrappers and parameters of jobs that are already distributed.
_DISTRIBUTED = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "DTensor")


def start(policy: Shard) -> None:
    """Restricts the process to its rank's device, and its DataLoaders to its part of the data.

    Raises:
        PolicyError: There are fewer devices than ranks.
    """
    if policy.world_size == 1 or os.environ.get("WORLD_SIZE") != str(policy.world_size):
        return  # a process that is not a rank, such as torchrun itself; otherwise apply reports the error
    choose_device()
    divide(_feed(policy))


def apply(job: Job, policy: Shard) -> None:
    """Shards the job; does nothing for a single rank.

    Raises:
        PolicyError: The ranks are missing, or the model or an optimizer cannot be sharded; nothing has been changed.
    """
    if policy.world_size == 1:
        job.notes.append("shard has one rank: nothing is sharded, and the job runs unchanged.")
        return
    names = units_of(job.model, policy.units) if policy.stage >= 2 else []
    _check(job, policy, names)
    rank = join_ranks(job, policy.world_size)
    feed = feed_of(job, partial(_feed, policy, rank))
    start_alike(job.model)
    left = 0
    if policy.stage >= 2:
        left = shard_fully(job, policy, names)
    else:
        averaging = Averaging(job.model, policy.bucket_mib)
        averaging.install()
        job.on_undo(averaging.remove)
        if policy.stage == 1:
            for optimizer in job.optimizers:
                DividedUpdates(optimizer, policy, rank).install(job)
    job.notes += _notes(job, policy, names, left)
    # A dry run has no other ranks to compare with.
    if not is_dry_run() and draws_alike(job.device) and not feed.divided:
        job.notes.append(SENTENCE)


def _feed(policy: Shard, rank: int | None = None) -> RankFeed:
    own = int(os.environ.get("RANK", "0")) if rank is None else rank
    return RankFeed(rank=own, ranks=policy.world_size, is_split=policy.batch == "split")


def _check(job: Job, policy: Shard, names: list[str]) -> None:
    """Rejects jobs that cannot be sharded.

    Raises:
        PolicyError: Names the reason and the remedy.
    """
    tensors = [*job.model.parameters(), *job.model.modules()]
    found = {kind.__name__ for each in tensors for kind in type(each).__mro__} & set(_DISTRIBUTED)
    if found:
        raise PolicyError(
            f"The job is already distributed ({', '.join(sorted(found))} is in its model); remove shard from the plan."
        )
    trained = [(name, each) for name, each in job.model.named_parameters() if each.requires_grad]
    if any(each.is_meta for _, each in trained) or len({each.device for _, each in trained}) > 1:
        raise PolicyError("shard needs a model with all parameters on one device; this one has them on several.")
    for name, module in job.model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            title = name or type(module).__name__
            raise PolicyError(
                f"Module {title} has sparse gradients, which are not summed over ranks; write sparse=False."
            )
    if policy.stage >= 1:
        job.require_optimizer("shard")
    if policy.stage >= 1 and any(optimizer.state for optimizer in job.optimizers):
        raise PolicyError(
            "An optimizer already has unsharded state; apply shard before its first update, and before it loads a "
            "state."
        )
    if policy.stage >= 1 and any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in job.optimizers):
        raise PolicyError("LBFGS treats all parameters as one vector, which cannot be sharded; use stage 0.")
    if policy.stage == 1:
        check_elementwise(job.optimizers)
    if policy.stage >= 2:
        check_units(job.model, names)


def _notes(job: Job, policy: Shard, names: list[str], left: int) -> list[str]:
    """Returns notes for the user on what changes."""
    ranks = policy.world_size
    notes = []
    if policy.batch == "split":
        notes.append(f"Each of the {ranks} ranks trains on its part of every DataLoader batch.")
    else:
        notes.append(
            f"Each of the {ranks} ranks trains on whole batches: an update is over {ranks} times the samples, and a "
            f"DataLoader's epoch has 1/{ranks} of the steps."
        )
    notes.append("Each rank runs the whole script, so it prints and saves once per rank.")
    if policy.stage >= 2:
        units = f"{len(names)} units and the rest of the model" if names else "the model as one unit"
        notes.append(
            f"Parameters are sharded and gathered by {units}; they are DTensors between steps. model.state_dict() "
            "gathers whole tensors, on all ranks; an optimizer's state_dict() holds this rank's part."
        )
    elif policy.stage == 1:
        notes.append("An optimizer's state_dict() holds this rank's part.")
    if left:
        notes.append(f"{left} tuples still hold the original parameters: changes to those have no effect.")
    norms = sum(isinstance(each, torch.nn.modules.batchnorm._BatchNorm) for each in job.model.modules())
    if norms:
        notes.append(f"{norms} BatchNorm layers compute statistics over each rank's own samples.")
    return notes


SENTENCE = (
    "All ranks draw the same random numbers, and no DataLoader feeds the model: if the script draws its batches "
    "itself, all ranks train on the same ones. Read from a DataLoader, whose batches are sharded, or add the "
    "environment's RANK to the seed."
)


def draws_alike(device: torch.device) -> bool:
    """Returns whether torch and Python will draw the same numbers on all ranks from here on."""
    state = bytes(torch.get_rng_state().tolist()) + repr(random.getstate()).encode()
    own = zlib.crc32(state)
    low, high = (torch.tensor(own, dtype=torch.int64, device=device) for _ in range(2))
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return bool(low == high)
