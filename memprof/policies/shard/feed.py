"""Restricts an unmodified script's DataLoaders to the rank's own part of the data."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import dataloader

from memprof.policies.accumulate.split import split_batch
from memprof.policies.runtime.replaced import replace

if TYPE_CHECKING:
    from memprof.policies.runtime.job import Job

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
