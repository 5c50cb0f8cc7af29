"""Splits a batch of any structure into micro-batches."""

from __future__ import annotations

import copy
import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.utils.data import dataloader

from memprof.errors import PolicyError
from memprof.policies.accumulate.round import ACTIVE, Round
from memprof.policies.runtime.replaced import replace
from memprof.recorder.memory.live_objects import live_objects
from memprof.recorder.steps.batches import WHOLE, batch_size, collect, fields_of, is_graphs, is_record


@dataclass(frozen=True)
class Part:
    """One micro-batch.

    Attributes:
        batch: What the training loop sees, structured like the whole batch.
        number: Its index in the batch.
        count: Micro-batches in the batch.
        weight: Its share of the batch's samples.
    """

    batch: Any
    number: int
    count: int
    weight: float


def micro_batches(batch: Any, count: int) -> Iterator[Any]:
    """Splits a batch in a custom training loop.

    Put ``for part in memprof.micro_batches(batch, 4):`` around forward, backward and the update. Under accumulate, each
    part's gradients are weighted by its share of the samples and the update is deferred to the last part; otherwise
    this only splits. A part that a DataLoader yielded under accumulate is not split again.

    Args:
        batch: Tensors whose first dimension is the batch, also in tuples, lists, mappings and dataclasses, or a batch
            of graphs of torch_geometric.
        count: Maximum number of micro-batches.

    Yields:
        The parts, views of the batch.

    Raises:
        PolicyError: The batch has no tensor to split.
    """
    if count < 1:
        raise PolicyError(f"cannot split a batch into {count} micro-batches; the number must be positive.")
    rounds = list(ACTIVE)
    if any(each.count > 1 and each.is_handed(batch) for each in rounds):
        yield batch
        return
    parts = split_batch(batch, count)
    if parts is None:
        raise PolicyError(
            f"micro_batches cannot split a {type(batch).__name__}; "
            "pass tensors whose first dimension is the batch, in a tuple, list or dict."
        )
    for part in parts:
        for each in rounds:
            each.hand_out(part.batch, part.number, part.count, part.weight)
        yield part.batch


def split_batch(batch: Any, count: int, expected_size: int | None = None) -> list[Part] | None:
    """Splits a batch along its samples, into equal parts or with the first ones one sample larger.

    Args:
        batch: Tensors, also in tuples, lists, mappings, dataclasses and batched graphs.
        count: Number of parts; a batch with fewer samples has one part per sample.
        expected_size: Usual batch size, if known.

    Returns:
        The parts, views of the batch (of graphs: copies); None where its size cannot be determined.
    """
    size = batch_size(batch, expected_size)
    if size is None:
        return None
    count = min(count, size)
    # As in torch.tensor_split: the remainder goes to the first parts, so that no part is needlessly large.
    edges = [number * (size // count) + min(number, size % count) for number in range(count + 1)]
    return [
        Part(_taken(batch, size, start, stop), number, count, (stop - start) / size)
        for number, (start, stop) in enumerate(itertools.pairwise(edges))
    ]


def _taken(value: Any, size: int, start: int, stop: int) -> Any:
    """Takes some samples: of every tensor and sequence with one entry per sample; everything else is shared."""
    if isinstance(value, torch.Tensor):
        return value[start:stop] if value.dim() and value.shape[0] == size else value
    if is_graphs(value):
        return type(value).from_data_list(value.to_data_list()[start:stop]) if value.num_graphs == size else value
    if isinstance(value, Mapping):
        taken = {key: _taken(each, size, start, stop) for key, each in value.items()}
        if type(value) is dict:
            return taken
        clone: Any = copy.copy(value)  # keeps its type, such as a tokenizer's BatchEncoding
        clone.update(taken)
        return clone
    if isinstance(value, (list, tuple)) and not isinstance(value, WHOLE):
        if len(value) == size and not _holds_batches(value, size):
            return type(value)(value[start:stop])
        entries = [_taken(each, size, start, stop) for each in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if is_record(value):
        part = copy.copy(value)
        for name, each in fields_of(value).items():
            object.__setattr__(part, name, _taken(each, size, start, stop))  # works for frozen dataclasses too
        return part
    return value


def _holds_batches(value: Any, size: int) -> bool:
    """Whether a sequence holds tensors of a whole batch: (images, labels) with two samples each."""
    tensors: list[torch.Tensor] = []
    collect(value, tensors, [])
    return any(tensor.shape[0] == size for tensor in tensors)


_ITERATOR = dataloader._BaseDataLoaderIter


class BatchFeed:
    """Sits between all DataLoader iterators and the training loop.

    It patches the iterator classes, not the loaders: a plan may be applied while the loop already holds an iterator.
    """

    def __init__(self, current: Round) -> None:
        """Yields nothing yet; until the model is known, batches are split while gradients are recorded."""
        self.round = current
        self._model: Callable[[], torch.nn.Module | None] = _nothing
        self._waiting: weakref.WeakKeyDictionary[Any, deque[Part]] = weakref.WeakKeyDictionary()
        self._ahead: weakref.WeakKeyDictionary[Any, Callable[[], None]] = weakref.WeakKeyDictionary()
        self._restore: Callable[[], None] = _nothing

    def follow(self, model: torch.nn.Module) -> None:
        """From now on, splits batches while this model is in training mode; evaluation batches stay whole."""
        self._model = weakref.ref(model)

    def install(self) -> None:
        """Starts splitting."""
        self._restore = replace(_ITERATOR, "__next__", lambda before: lambda iterator: self._next(iterator, before))

    def remove(self) -> None:
        """Restores the iterators; micro-batches not yet yielded are dropped with their batch."""
        self._restore()
        self._waiting.clear()

    def _next(self, iterator: Any, before: Any) -> Any:
        """Returns the next batch for the loop, or the loader around it, and records what the loop then holds."""
        looks_ahead = _looks_ahead(sys._getframe(1))
        try:
            batch, note = self._take(iterator, before)
        except StopIteration:
            if looks_ahead:
                self._ahead.pop(iterator, _nothing)()  # the last one is passed on now
            elif iterator in self._waiting:  # not that of an evaluation in between
                self.round.rest()
            raise
        if looks_ahead:
            # The batch fetched earlier is passed on now; the new one is not the loop's yet.
            note, self._ahead[iterator] = self._ahead.pop(iterator, _nothing), note
        note()
        return batch

    def _take(self, iterator: Any, before: Any) -> tuple[Any, Callable[[], None]]:
        """Returns a part or a whole batch, and a callback that records that the loop has received it."""
        waiting = self._waiting.get(iterator)
        if not waiting:
            batch = before(iterator)
            if not (torch.is_grad_enabled() if (model := self._model()) is None else model.training):
                self.round.evaluate(lambda: (model := self._model()) is None or not model.training)
                return batch, _nothing
            size = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)  # of no custom sampler
            parts = split_batch(batch, self.round.micro_batches, size if isinstance(size, int) else None)
            if parts is None or len(parts) == 1:
                found = "have a single sample" if parts else f"are of an unsupported type ({type(batch).__name__})"
                return batch, partial(self.round.leave_whole, batch, f"they {found}")
            if iterator not in self._waiting:  # a loop that exits early drops it
                weakref.finalize(iterator, self.round.rest).atexit = False
            waiting = self._waiting[iterator] = deque(parts)
        part = waiting.popleft()
        return part.batch, partial(self.round.hand_out, part.batch, part.number, part.count, part.weight)


def _nothing() -> None:
    pass


def _looks_ahead(caller: FrameType | None) -> bool:
    """Whether an accelerate loader calls, through memprof: it passes a batch on only after fetching the next one."""
    while caller is not None and str(caller.f_globals.get("__name__")).startswith("memprof."):
        caller = caller.f_back
    if caller is None:
        return False
    return caller.f_code.co_name == "__iter__" and caller.f_globals.get("__name__") == "accelerate.data_loader"


#: The feed of a job whose model does not exist yet.
_prepared: list[BatchFeed] = []


def split_from_start(micro_batches: int) -> None:
    """Starts splitting before the model exists, so that a script's first batch is split too.

    For launchers of unmodified scripts: a plan is applied at the model's first forward, when the loop already holds the
    first batch. ``apply_accumulate`` takes over the feed started here.
    """
    feed = BatchFeed(Round(micro_batches))
    feed.install()
    _prepared.append(feed)


def take_prepared(micro_batches: int) -> BatchFeed | None:
    """Returns the feed that already splits into this many parts, None if there is none."""
    if _prepared and _prepared[0].round.micro_batches == micro_batches:
        return _prepared.pop()
    return None


def is_batch_in_hand() -> bool:
    """Whether a DataLoader has already yielded a batch: the loop is running and its first batch came whole."""
    return any(each._num_yielded > 0 for each in live_objects(_ITERATOR))
