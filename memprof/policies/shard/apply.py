"""Shards an unmodified training job over the ranks started by torchrun."""

from __future__ import annotations

import os
import random
import weakref
import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import dataloader

from memprof.errors import PolicyError
from memprof.policies.accumulate.split import split_batch
from memprof.policies.runtime.replaced import is_dry_run, replace
from memprof.policies.shard.averaging import Averaging
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
    """Rejects jobs that cannot be sharded."""
    tensors = [*job.model.parameters(), *job.model.modules()]
    found = {kind.__name__ for each in tensors for kind in type(each).__mro__} & set(_DISTRIBUTED)
    if found:
        raise PolicyError(
            f"the job is already distributed ({', '.join(sorted(found))} is in its model); remove shard from the plan."
        )
    trained = [(name, each) for name, each in job.model.named_parameters() if each.requires_grad]
    if any(each.is_meta for _, each in trained) or len({each.device for _, each in trained}) > 1:
        raise PolicyError("shard needs a model with all parameters on one device; this one has them on several.")
    for name, module in job.model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            title = name or type(module).__name__
            raise PolicyError(
                f"module {title} has sparse gradients, which are not summed over ranks; write sparse=False."
            )
    if policy.stage >= 1:
        job.require_optimizer("shard")
    if policy.stage >= 1 and any(optimizer.state for optimizer in job.optimizers):
        raise PolicyError(
            "an optimizer already has unsharded state; apply shard before its first update, and before it loads a "
            "state."
        )
    if policy.stage >= 1 and any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in job.optimizers):
        raise PolicyError("LBFGS treats all parameters as one vector, which cannot be sharded; use stage 0.")
    if policy.stage == 1:
        check_elementwise(job.optimizers)
    if policy.stage >= 2:
        check_units(job.model, names)


def _notes(job: Job, policy: Shard, names: list[str], left: int) -> list[str]:
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


_ITERATOR = dataloader._BaseDataLoaderIter


class RankFeed:
    """Intercepts the iterators of all DataLoaders.

    Batches of a loop that records no gradients (an evaluation) are not divided: each rank sees all of them.

    Attributes:
        divided: Iterators that were divided.
        whole: Training iterators that could not be.
        has_job: Whether a job ends it.
    """

    def __init__(self, *, rank: int, ranks: int, is_split: bool) -> None:
        """Stores the settings; divides nothing yet.

        Args:
            rank: Rank of this process.
            ranks: Number of ranks.
            is_split: Divide each batch along its samples; otherwise each rank takes whole batches in turn.
        """
        self._rank, self._ranks, self._is_split = rank, ranks, is_split
        self._is_training: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._restore: Callable[[], None] = lambda: None
        self.divided = self.whole = 0
        self.has_job = False

    def install(self) -> None:
        """Starts dividing."""
        name, method = ("__next__", self._batch_for) if self._is_split else ("_next_index", self._index_for)
        self._restore = replace(_ITERATOR, name, lambda before: lambda iterator: method(before, iterator))

    def remove(self) -> None:
        """Restores the iterators."""
        self._restore()

    def _index_for(self, before: Any, iterator: Any) -> Any:
        """Draws one batch per rank and keeps this rank's; an incomplete round ends the loop, on all ranks at once."""
        if not self._is_divided(iterator):
            return before(iterator)
        indices = [before(iterator) for _ in range(self._ranks)]
        return indices[self._rank]

    def _batch_for(self, before: Any, iterator: Any) -> Any:
        """Returns this rank's samples of the next batch."""
        batch = before(iterator)
        if not self._is_divided(iterator):
            return batch
        size = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)
        parts = split_batch(batch, self._ranks, size if isinstance(size, int) else None)
        # If a batch has fewer samples than ranks, some ranks train on the same ones.
        return batch if parts is None else parts[self._rank % len(parts)].batch

    def _is_divided(self, iterator: Any) -> bool:
        known = self._is_training.get(iterator)
        if known is None:
            known = torch.is_grad_enabled()
            # The batches of an IterableDataset cannot be predicted.
            is_endless = isinstance(iterator._index_sampler, dataloader._InfiniteConstantSampler)
            is_own = isinstance(getattr(iterator._index_sampler, "sampler", None), torch.utils.data.DistributedSampler)
            if known and (is_own or (is_endless and not self._is_split)):
                self.whole += not is_own
                known = False
            self.divided += known
            self._is_training[iterator] = known
        return known


#: The feed that divides the batches of this process, if any.
_dividing: list[RankFeed] = []


def divide(feed: RankFeed) -> None:
    """Starts dividing, from the job's start so that its first batch is already the rank's own."""
    feed.install()
    _dividing.append(feed)


def feed_of(job: Job, make: Callable[[], RankFeed]) -> RankFeed:
    """Returns the feed that divides the batches of this process, one for all models of the job.

    Args:
        job: The job of one model. The feed ends when the first job that asked for it is undone.
        make: Makes the feed if none is dividing.
    """
    if not _dividing:
        divide(make())
    feed = _dividing[0]
    if not feed.has_job:
        feed.has_job = True
        job.on_undo(partial(_end, feed))
    return feed


def _end(feed: RankFeed) -> None:
    _dividing.remove(feed)
    feed.remove()
