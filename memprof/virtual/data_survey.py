"""Walks an epoch of a job's data loaders without training, and has the dry run train on a typical and on large batches.

The first loader during whose batches a step ends is the training loader; the job ends when its chosen batches are used
up.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.data import DataLoader

from memprof.recorder.steps.batches import WHOLE, entries_of, fields_of, is_graphs, is_record
from memprof.recorder.steps.window import end_job
from memprof.trace.files.private_file import write_private

#: Large batches that are trained on, besides a typical one.
_MOST_LARGE = 10
#: Times that a batch is repeated until a step has ended: micro-batches of an update.
_MOST_REPEATS = 64
#: Batches, spread over the epoch, of which a typical one is chosen.
_KEPT = 16
#: Samples of an epoch whose places are listed: a sampler may never end.
_MOST_INDICES = 2**22
#: Stands for the number of batches, where a loader does not say it.
_UNKNOWN = -1


@dataclass
class _Walk:
    """What was read of an epoch.

    Attributes:
        line: File and line of the loop over the loader.
        batches: Batches of an epoch, -1 where the loader does not say.
        is_shuffled: Another epoch has its samples in other batches.
        index: Place of each batch that was read, in an epoch.
        sizes: Elements of each part of it and its longest side; of a list the sum and the longest.
        shapes: Shapes of its parts in words.
        seconds: What reading them took.
        chosen: Batches to train on, the typical one among them.
        steps: Place of each batch that was trained on, the typical one first, and the step when it was yielded. A loop
            that fetches a batch ahead trains on it in the next one.
    """

    line: str
    batches: int
    is_shuffled: bool
    index: list[int] = field(default_factory=list)
    sizes: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    shapes: list[dict[str, str]] = field(default_factory=list)
    seconds: float = 0.0
    chosen: int = 0
    steps: list[tuple[int, int]] = field(default_factory=list)


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
        self._is_reading = False
        self._read_before: WeakKeyDictionary[Any, tuple[_Walk, list[tuple[int | None, Any]]]] = WeakKeyDictionary()

    def install(self) -> None:
        """Has each loader yield the chosen batches instead of its epoch."""
        loaders: Any = DataLoader
        original = loaders.__iter__

        def walk(loader: Any) -> Any:
            if self._is_reading or torch.utils.data.get_worker_info() is not None:
                return original(loader)
            return self._yield(loader, original)

        loaders.__iter__ = walk

    def _yield(self, loader: Any, original: Callable[[Any], Any]) -> Iterator[Any]:
        """Yields each chosen batch until a step ends, and ends the job then; a loader without steps goes on."""
        if loader not in self._read_before:
            self._is_reading = True
            try:
                self._read_before[loader] = self._read(loader, original)
            finally:
                self._is_reading = False
        walk, order = self._read_before[loader]
        walk.line = _line_of_loop()  # it may be that of an evaluation, whose loader trains later
        for place, batch in order:
            began = self._step_of()
            for _ in range(_MOST_REPEATS):
                yield batch
                if self._step_of() > began:
                    break
            else:
                if not walk.steps:
                    return  # no training loader
                break
            if place is not None:
                walk.steps.append((place, began))
                write_private(self._path, json.dumps(asdict(walk)))  # the job may leave its loop at any batch
        if walk.steps:
            end_job()

    def _read(self, loader: Any, original: Callable[[Any], Any]) -> tuple[_Walk, list[tuple[int | None, Any]]]:
        """Reads the batches of an epoch in this process, in an order that covers it evenly if time ends.

        Returns:
            What was read, and the batches to train on, in order. Those whose peaks count have their places: a typical
            one, and each large one after the batch before it in the epoch, of which a loop may still keep tensors.
        """
        began = time.monotonic()
        with unset_fake_temporarily(), _in_this_process(loader), _unchanged_random_numbers():
            iterator = original(loader)
            fetch, next_index = iterator._dataset_fetcher.fetch, iterator._next_index
            is_stream = iterator._dataset_kind == torch.utils.data.dataloader._DatasetKind.Iterable
            in_order = torch.utils.data.SequentialSampler, torch.utils.data.dataloader._InfiniteConstantSampler
            walk = _Walk("", _length(loader), not isinstance(getattr(loader, "sampler", None), in_order))
            largest: dict[str, tuple[tuple[float, int], int, Any, Any]] = {}
            before: Any = None
            kept: list[tuple[int, Any]] = []
            indices: list[Any] = []
            count = 0
            while not is_stream and count < _MOST_INDICES and time.monotonic() - began < self._seconds / 2:
                try:
                    indices.append(next_index())
                except StopIteration:
                    walk.batches = len(indices)
                    break
                count += len(indices[-1]) if isinstance(indices[-1], list) else 1
            for place in iter(range(1 << 62)) if is_stream else _spread(len(indices)):
                try:
                    batch = fetch(next_index() if is_stream else indices[place])
                except StopIteration:
                    walk.batches = place
                    break
                _measure(walk, batch, place, before, largest)
                before = batch if is_stream else None
                if len(kept) < _KEPT:
                    kept.append((place, batch))
                if time.monotonic() - began > self._seconds:
                    break
            walk.seconds = time.monotonic() - began
            if not kept:
                return walk, []
            total = {place: _total(sizes)[0] for place, sizes in zip(walk.index, walk.sizes, strict=True)}
            middle = median_low(total.values())
            place, typical = min(kept, key=lambda one: abs(total[one[0]] - middle))
            order: list[tuple[int | None, Any]] = [(None, typical), (place, typical), (None, typical)]
            # Of all parts together first: those decide if there are more than are trained on.
            by_total = sorted(largest.items(), key=lambda one: not one[0].endswith(" "))
            large = {place: (batch, before) for _, (_, place, batch, before) in by_total}
            walk.chosen = 1 + min(len(large), _MOST_LARGE)
            for place, (batch, previous) in list(large.items())[:_MOST_LARGE]:
                if previous is None:
                    earlier = typical if is_stream or not place else fetch(indices[place - 1])
                else:
                    earlier = previous
                order += [(None, earlier), (place, batch), (None, typical)]
        return walk, order


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:
        return _UNKNOWN


def _total(sizes: dict[str, tuple[int, int]]) -> tuple[int, int]:
    return sum(size for size, _ in sizes.values()), max((side for _, side in sizes.values()), default=0)


def _measure(
    walk: _Walk, batch: Any, place: int, before: Any, largest: dict[str, tuple[tuple[float, int], int, Any, Any]]
) -> None:
    """Adds a batch to what was read, and keeps it if it is the largest so far by any measure.

    Layers take memory by a batch's elements, attention by these times the longest side, and most models have both.
    The highest power finds the longest side.
    """
    parts: dict[str, list[tuple[int, ...]]] = {}
    _collect(batch, "", parts)
    sizes = {
        name: (sum(map(math.prod, shapes)), max((max(shape, default=0) for shape in shapes), default=0))
        for name, shapes in parts.items()
    }
    walk.index.append(place)
    walk.sizes.append(sizes)
    walk.shapes.append({name: _in_words(shapes) for name, shapes in parts.items()})
    for power in (0.0, 1.0, 0.5, 8.0):
        for name, (size, side) in {"": _total(sizes), **sizes}.items():
            measure = size * float(side) ** power, side
            key = f"{power} {name}"
            if key not in largest or measure > largest[key][0]:
                largest[key] = measure, place, batch, before


def _spread(count: int) -> Iterator[int]:
    """Returns every place from 0 to a count, the first ones spread over all: by halves, quarters and so on."""
    stride = 1 << (max(count, 1) - 1).bit_length()
    yield from range(0, count, stride)
    while stride > 1:
        yield from range(stride // 2, count, stride)
        stride //= 2


def _collect(value: Any, name: str, parts: dict[str, list[tuple[int, ...]]]) -> None:
    """Adds the shapes of the tensors in a batch by their names; entries of a list share one."""
    if isinstance(value, torch.Tensor) or (type(value).__module__ == "numpy" and hasattr(value, "shape")):
        parts.setdefault(name or "batch", []).append(tuple(value.shape))
    elif is_graphs(value) or hasattr(value, "keys") or is_record(value):
        if is_graphs(value):
            value = value.to_dict()
        elif not hasattr(value, "keys"):
            value = fields_of(value)
        for key in list(value):
            _collect(value[key], f"{name}.{key}" if name else str(key), parts)
    elif isinstance(value, (list, tuple)) and not isinstance(value, WHOLE):
        is_of_parts = (isinstance(value, tuple) and not name) or len({_kind_of(entry) for entry in value}) > 1
        for place, entry in enumerate(entries_of(value)):
            _collect(entry, f"{name}[{place}]" if is_of_parts and len(value) <= _KEPT else f"{name}[*]", parts)


def _kind_of(value: Any) -> Any:
    return (type(value), value.dim(), value.dtype) if isinstance(value, torch.Tensor) else type(value)


def _in_words(shapes: list[tuple[int, ...]]) -> str:
    """Returns a shape, or of several how many there are and the largest: ``4 up to 300x4``, in words."""
    widest = max(shapes, key=math.prod)
    largest = "x".join(map(str, widest)) or "scalar"
    return largest if len(shapes) == 1 else f"{len(shapes)} up to {largest}"


def _line_of_loop() -> str:
    """Returns file and line of the job's code that iterates over the loader."""
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
