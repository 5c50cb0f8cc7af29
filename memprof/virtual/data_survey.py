"""Walks an epoch of a job's data loaders without training, and has the dry run train on typical and on largest batches.

The first loader whose batches an optimizer's update follows is the training loader; the job ends when its chosen
batches are used up.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from memprof.recorder.steps.batches import WHOLE, entries_of, fields_of, is_graphs, is_record
from memprof.recorder.steps.window import end_job
from memprof.trace.files.private_file import write_private

#: Largest batches that are trained on, besides two typical ones.
_MOST_LARGEST = 10
#: Times that a batch is repeated until an update follows: micro-batches of one update.
_MOST_REPEATS = 64
#: Batches of a stream that are kept to choose a typical one from, since they cannot be read again.
_KEPT = 16
#: Stands for the number of batches, where a loader does not say it.
_UNKNOWN = -1
#: Parts of a batch, by their names without the places in lists: what it is measured by.
Sizes = dict[str, tuple[int, ...]]


@dataclass
class _Walk:
    """What was read of an epoch.

    Attributes:
        line: File and line of the loop over the loader.
        batches: Batches of an epoch, -1 where the loader does not say.
        is_shuffled: Another epoch has its samples in other batches.
        index: Place of each batch that was read, in an epoch.
        sizes: Elements of each part of it, the sum over lists.
        shapes: Shapes of its parts in words.
        chosen: The batches to train on, each with its place and why.
        seconds: What reading them took.
    """

    line: str
    batches: int
    is_shuffled: bool
    index: list[int] = field(default_factory=list)
    sizes: list[dict[str, int]] = field(default_factory=list)
    shapes: list[dict[str, str]] = field(default_factory=list)
    chosen: list[tuple[Any, int, str]] = field(default_factory=list)
    seconds: float = 0.0


class DataSurvey:
    """Reads the loaders of a dry run."""

    def __init__(self, path: Path, seconds: float, step_of: Callable[[], int]) -> None:
        """Changes nothing yet.

        Args:
            path: File that the survey of the training loader is written to, as JSON.
            seconds: Time that reading an epoch of a loader may take; a part is read where it takes longer.
            step_of: Returns the number of the job's current step.
        """
        self._path, self._seconds, self._step_of = path, seconds, step_of
        self._updates = 0
        self._until = 0.0
        self._is_surveying = False

    def install(self) -> None:
        """Has each loader yield the chosen batches instead of its epoch."""
        loaders: Any = DataLoader
        original = loaders.__iter__
        register_optimizer_step_post_hook(self._count_update)

        def walk(loader: Any) -> Any:
            if self._is_surveying or torch.utils.data.get_worker_info() is not None:
                return original(loader)
            return self._yield(loader, original)

        loaders.__iter__ = walk

    def _count_update(self, *_: Any) -> None:
        self._updates += 1
        # A loop without a loader is followed for as long as an epoch would be read.
        self._until = self._until or time.monotonic() + self._seconds
        if not self._is_surveying and time.monotonic() > self._until:
            end_job()

    def _yield(self, loader: Any, original: Callable[[Any], Any]) -> Iterator[Any]:
        """Yields each chosen batch until an update follows, and ends the job then; a loader without updates goes on."""
        self._is_surveying = True
        try:
            walk = self._read(loader, original)
        finally:
            self._is_surveying = False
        began, used = self._updates, []
        self._until = time.monotonic() + 1e9  # from here on, the chosen batches end the job
        for batch, place, why in walk.chosen:
            before = self._updates
            used.append((self._step_of(), place, why))
            for _ in range(_MOST_REPEATS):
                yield batch
                if self._updates > before:
                    break
            else:
                if self._updates == began:
                    self._until = 0.0
                    return  # no training loader
        if self._updates == began:
            self._until = 0.0
            return
        self._write(walk, used)
        end_job()

    def _read(self, loader: Any, original: Callable[[Any], Any]) -> _Walk:
        """Reads the batches of an epoch in this process, in an order that covers it evenly if time ends."""
        began = time.monotonic()
        with unset_fake_temporarily(), _in_this_process(loader), _unchanged_random_numbers():
            iterator = original(loader)
            fetch, next_index = iterator._dataset_fetcher.fetch, iterator._next_index
            is_stream = iterator._dataset_kind == torch.utils.data.dataloader._DatasetKind.Iterable
            try:
                count = len(loader)
            except TypeError:
                count = _UNKNOWN
            sampler = getattr(loader, "sampler", None)
            in_order = torch.utils.data.SequentialSampler, torch.utils.data.dataloader._InfiniteConstantSampler
            walk = _Walk(_line_of_loop(), count, not isinstance(sampler, in_order))
            largest: dict[str, tuple[int, int, Any]] = {}
            kept: list[tuple[int, Any]] = []
            indices: list[Any] = []
            if not is_stream:
                for index in iter(lambda: _next(next_index), None):
                    indices.append(index)
                    if time.monotonic() - began > self._seconds / 2:
                        break
                else:
                    walk.batches = len(indices)
            for place in _spread(len(indices)) if not is_stream else iter(range(1 << 62)):
                try:
                    batch = fetch(next_index() if is_stream else indices[place])
                except StopIteration:
                    walk.batches = place
                    break
                self._measure(walk, batch, place, largest)
                if len(kept) < _KEPT:
                    kept.append((place, batch))
                if time.monotonic() - began > self._seconds:
                    break
            if walk.sizes:
                total = [sum(sizes.values()) for sizes in walk.sizes]
                middle = sorted(range(len(total)), key=lambda row: (total[row], row))[len(total) // 2]
                typical = walk.index[middle]
                if is_stream:
                    totals = dict(zip(walk.index, total, strict=True))
                    typical, batch = min(kept, key=lambda one: abs(totals[one[0]] - total[middle]))
                else:
                    batch = fetch(indices[typical])
                walk.chosen = [(batch, typical, "typical")] * 2
                seen: set[int] = set()
                order = sorted(largest.items(), key=lambda one: one[0] != _ALL)
                for name, (_, place, worst) in order:
                    if place not in seen and len(seen) < _MOST_LARGEST:
                        seen.add(place)
                        walk.chosen.append((worst, place, name))
        walk.seconds = time.monotonic() - began
        return walk

    def _measure(self, walk: _Walk, batch: Any, place: int, largest: dict[str, tuple[int, int, Any]]) -> None:
        """Adds a batch to what was read, and keeps it if it is the largest so far by any part."""
        parts: dict[str, list[tuple[int, ...]]] = {}
        _collect(batch, "", parts)
        sizes = {name: sum(_elements(shape) for shape in shapes) for name, shapes in parts.items()}
        walk.index.append(place)
        walk.sizes.append(sizes)
        walk.shapes.append({name: _in_words(shapes) for name, shapes in parts.items()})
        measures = {_ALL: sum(sizes.values()), **sizes}
        for name, shapes in parts.items():  # padded: the longest side decides what attention takes
            measures[f"{name} longest"] = max((max(shape, default=0) for shape in shapes), default=0)
        for name, size in measures.items():
            if size > largest.get(name, (0, 0, None))[0]:
                largest[name] = size, place, batch

    def _write(self, walk: _Walk, used: list[tuple[int, int, str]]) -> None:
        # The last step begins with the last batch; each earlier one ends where the next begins.
        write_private(
            self._path,
            json.dumps(
                {
                    "line": walk.line,
                    "batches": walk.batches,
                    "is_shuffled": walk.is_shuffled,
                    "seconds": walk.seconds,
                    "index": walk.index,
                    "sizes": walk.sizes,
                    "shapes": walk.shapes,
                    "steps": [{"step": step, "batch": place, "largest_by": why} for step, place, why in used],
                }
            ),
        )


#: The measure of all parts together.
_ALL = "all"


def _next(next_index: Callable[[], Any]) -> Any:
    try:
        return next_index()
    except StopIteration:
        return None


def _spread(count: int) -> Iterator[int]:
    """Returns every place from 0 to a count, the first ones spread over all: by halves, quarters and so on."""
    stride = 1
    while stride < count:
        stride *= 2
    seen: set[int] = set()
    while count and stride:
        for place in range(0, count, stride):
            if place not in seen:
                seen.add(place)
                yield place
        stride //= 2


def _collect(value: Any, name: str, parts: dict[str, list[tuple[int, ...]]]) -> None:
    """Adds the shapes of the tensors in a batch by their names; entries of a list share one."""
    if isinstance(value, torch.Tensor) or (type(value).__module__ == "numpy" and hasattr(value, "shape")):
        parts.setdefault(name or "batch", []).append(tuple(value.shape))
    elif hasattr(value, "keys") and not is_graphs(value):
        for key in list(value):
            _collect(value[key], f"{name}.{key}" if name else str(key), parts)
    elif is_graphs(value):
        for key, entry in value.to_dict().items():
            _collect(entry, f"{name}.{key}" if name else str(key), parts)
    elif is_record(value):
        for key, entry in fields_of(value).items():
            _collect(entry, f"{name}.{key}" if name else str(key), parts)
    elif isinstance(value, (list, tuple)) and not isinstance(value, WHOLE):
        is_of_parts = isinstance(value, tuple) or len({_kind_of(entry) for entry in value}) > 1
        for place, entry in enumerate(entries_of(value)):
            _collect(entry, f"{name}[{place}]" if is_of_parts and len(value) <= _KEPT else f"{name}[*]", parts)


def _kind_of(value: Any) -> Any:
    return (type(value), value.dim(), value.dtype) if isinstance(value, torch.Tensor) else type(value)


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _in_words(shapes: list[tuple[int, ...]]) -> str:
    """Returns a shape, or of several how many there are and the largest: ``4 up to 300x4``, in words."""
    widest = max(shapes, key=_elements)
    largest = "x".join(map(str, widest)) or "scalar"
    return largest if len(shapes) == 1 else f"{len(shapes)} up to {largest}"


def _line_of_loop() -> str:
    """Returns file and line of the job's code that iterates over the loader."""
    import sys

    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if owner not in ("memprof", "torch"):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@contextmanager
def _in_this_process(loader: Any) -> Iterator[None]:
    """Has a loader read its batches without workers, and not pin them."""
    kept = loader.num_workers, loader.timeout, loader.pin_memory
    loader.num_workers, loader.timeout, loader.pin_memory = 0, 0, False
    try:
        yield
    finally:
        loader.num_workers, loader.timeout, loader.pin_memory = kept


@contextmanager
def _unchanged_random_numbers() -> Iterator[None]:
    """Restores the states of the random generators."""
    import numpy as np

    of_numpy = np.random.get_state()  # noqa: NPY002 - the job's own
    states = random.getstate(), torch.random.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(of_numpy)  # noqa: NPY002 - the job's own
        torch.random.set_rng_state(states[1])
