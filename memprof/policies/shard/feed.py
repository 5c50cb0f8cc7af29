"""Gives each rank its own part of what the DataLoaders of an unmodified script hand out."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils.data import dataloader

from memprof.policies.accumulate.split import split_batch

_ITERATOR = dataloader._BaseDataLoaderIter


class RankFeed:
    """Stands between the iterators of all DataLoaders and what a rank trains on.

    Batches of a loop that records no gradients (an evaluation) are left whole: each rank sees all of them.

    Attributes:
        divided: Iterators that were given a rank's part.
        whole: Training iterators that could not be.
    """

    def __init__(self, *, rank: int, ranks: int, is_split: bool) -> None:
        """Divides nothing yet.

        Args:
            rank: This process.
            ranks: How many there are.
            is_split: Divide each batch along its samples; otherwise each rank takes whole batches in turn.
        """
        self._rank, self._ranks, self._is_split = rank, ranks, is_split
        self._is_training: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._next_index: Any = _ITERATOR._next_index
        self._next: Any = _ITERATOR.__next__
        self.divided = self.whole = 0

    def install(self) -> None:
        """Begins to divide."""
        feed = self

        def _next_index(iterator: Any) -> Any:
            return feed._index_for(iterator)

        def __next__(iterator: Any) -> Any:  # noqa: N807 - it becomes the method of that name
            return feed._batch_for(iterator)

        # Assignments to methods are none to mypy.
        if self._is_split:
            setattr(_ITERATOR, "__next__", __next__)  # noqa: B010
        else:
            setattr(_ITERATOR, "_next_index", _next_index)  # noqa: B010

    def remove(self) -> None:
        """Leaves the iterators as they were."""
        setattr(_ITERATOR, "_next_index", self._next_index)  # noqa: B010 - as above
        setattr(_ITERATOR, "__next__", self._next)  # noqa: B010 - as above

    def _index_for(self, iterator: Any) -> Any:
        """Takes one of the next batches for each rank; a round that is not full ends the loop, on all ranks at once."""
        if not self._is_divided(iterator):
            return self._next_index(iterator)
        indices = [self._next_index(iterator) for _ in range(self._ranks)]
        return indices[self._rank]

    def _batch_for(self, iterator: Any) -> Any:
        """Takes this rank's samples of the next batch."""
        batch = self._next(iterator)
        if not self._is_divided(iterator):
            return batch
        size = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)
        parts = split_batch(batch, self._ranks, size if isinstance(size, int) else None)
        # A batch of fewer samples than ranks: some train on the same ones.
        return batch if parts is None else parts[self._rank % len(parts)].batch

    def _is_divided(self, iterator: Any) -> bool:
        known = self._is_training.get(iterator)
        if known is None:
            known = torch.is_grad_enabled()
            # Of an IterableDataset nobody can tell which batches there will be.
            is_endless = isinstance(iterator._index_sampler, dataloader._InfiniteConstantSampler)
            is_own = isinstance(getattr(iterator._index_sampler, "sampler", None), torch.utils.data.DistributedSampler)
            if known and (is_own or (is_endless and not self._is_split)):
                self.whole += not is_own
                known = False
            self.divided += known
            self._is_training[iterator] = known
        return known


#: The feed of a job whose model is not known yet.
_prepared: list[RankFeed] = []


def feed_from_start(feed: RankFeed) -> None:
    """Begins to divide before the model is known, so that the very first batch is a rank's own."""
    feed.install()
    _prepared.append(feed)


def take_prepared() -> RankFeed | None:
    """Returns the feed that divides already, None where there is none."""
    return _prepared.pop() if _prepared else None
