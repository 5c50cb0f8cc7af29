"""What the job's DataLoaders take of host memory: workers, batches in flight, and the data set."""

from __future__ import annotations

import gc
import os
import sys
import types
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from memprof.recorder.calls.tracebacks import OWN_CODE

#: Batches from the start that are measured, and those at which workers are.
MOST_BATCHES, _MEASURED = 64, frozenset(1 << power for power in range(7))
#: Batches that the job itself holds: the one that it trains on, and the next one, until the variable is bound to it.
HELD = 2
#: Objects of a data set that are looked at; of a longer container, evenly spaced elements stand for all.
_MOST_OBJECTS, _SAMPLE, _INNER_SAMPLE = 200_000, 2_000, 64
#: Of one that is larger than a page, only the first is written when a reference to it is counted.
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_OF_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType)
_CONTAINERS = (list, tuple, set, frozenset, dict)
_KINDS = ("objects", "arrays", "mapped")
#: Bytes in front of an array, and those of a tensor besides its storage.
_HEAD_BYTES, _TENSOR_BYTES = 16, 512
#: Python's allocator serves small objects in multiples of these bytes.
_ALIGNED = 16

#: Samplers whose length takes no code of the job's but the length of its data set, which they read themselves.
_OF_TORCH = {BatchSampler, DistributedSampler, RandomSampler, SequentialSampler}


@dataclass(eq=False)
class _Loader:
    """What is known of a DataLoader.

    Attributes:
        loader: The DataLoader; once it is gone or through, the next one made in the same place, as for each epoch.
        frames: Stack of the call that made it, innermost first, as ``file:line:function``.
        sizes: How many tensors of each size, in bytes, its largest batch has.
        seen: Batches seen.
        worker_bytes: Most memory of its own that one of its workers had.
        workers: Its number of workers.
        in_flight: Batches in flight at most.
        is_pinned: Whether its batches are pinned.
        is_forked: Whether its workers are forked.
        data_bytes: Its data set, by kind (`data_sizes`).
    """

    loader: weakref.ref[Any]
    frames: list[str]
    sizes: Counter[int] = field(default_factory=Counter)
    seen: int = 0
    worker_bytes: int = 0
    workers: int = 0
    in_flight: int = 0
    is_pinned: bool = False
    is_forked: bool = True
    data_bytes: dict[str, int] = field(default_factory=dict)


class LoaderObserver:
    """Notes where DataLoaders are made, and measures their first batches.

    Attributes:
        measures: Whether to measure workers and data sets, too, as in dry runs: of a real one, samples tell.
    """

    def __init__(self, *, measures: bool) -> None:
        """Starts without any."""
        self.measures = measures
        self._loaders: list[_Loader] = []
        self._by_iterator: weakref.WeakKeyDictionary[Any, _Loader] = weakref.WeakKeyDictionary()

    def note_loader(self, loader: Any) -> None:
        """Notes a DataLoader, at the start of its ``__init__``."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is loader:
            frame = frame.f_back  # of its class and of subclasses
        frames = list(frames_of(frame))
        iterated = list(self._by_iterator.values())
        for one in self._loaders:
            if one.frames == frames and (one.loader() is None or (one.seen and one not in iterated)):
                one.loader = weakref.ref(loader)
                return
        self._loaders.append(_Loader(weakref.ref(loader), frames))

    def note_iterator(self, iterator: Any, loader: Any) -> None:
        """Notes a DataLoader's iterator, at the start of its ``__init__``."""
        one = next((each for each in self._loaders if each.loader() is loader), None)
        if one is None:
            return
        self._by_iterator[iterator] = one
        with suppress(Exception):  # of a property of the job's: this one is not measured
            one.workers = loader.num_workers
            one.in_flight = one.workers * (loader.prefetch_factor or 0) + HELD
            if {type(loader._index_sampler), type(loader.sampler)} <= _OF_TORCH:
                one.in_flight = min(one.in_flight, len(loader._index_sampler))
            if one.workers:  # without, the job may still choose how processes start: to ask would be to choose
                context = loader.multiprocessing_context or torch.multiprocessing
                one.is_forked = context.get_start_method() == "fork"

    def see(self, iterator: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Measures a batch."""
        found = self._by_iterator.get(iterator)
        if found is None or found.seen >= MOST_BATCHES:
            return
        fields = vars(iterator)
        found.is_pinned = bool(fields.get("_pin_memory"))
        if not found.seen and self.measures and found.workers:
            found.data_bytes = data_sizes((fields.get("_dataset"), fields.get("_collate_fn")))
        found.seen += 1
        sizes = Counter(sorted(one.untyped_storage().nbytes() for one in tensors))
        if _sum(sizes) > _sum(found.sizes):
            found.sizes = sizes
        if self.measures and found.seen in _MEASURED:
            for worker in vars(iterator).get("_workers", ()):
                found.worker_bytes = max(found.worker_bytes, _own_bytes(worker.pid))

    def needs(self) -> Iterable[dict[str, Any]]:
        """Yields a record for each kind and size of memory, in the columns of `memprof.trace.schema.HostNeeds`."""
        for number, one in enumerate(self._loaders):
            if not one.seen:
                continue
            common = {"loader": number, "frames": one.frames, "batches": 0}
            if one.workers:
                kind, size = "forked" if one.is_forked else "started", one.worker_bytes
                yield {**common, "kind": kind, "count": one.workers, "requested_bytes": size, "size_bytes": size}
            for size, count in one.sizes.items() if one.workers else ():
                pages = -(-size // _PAGE_BYTES) * _PAGE_BYTES
                yield _of_batch(common, "batch", one, size, count, pages)
            for size, count in one.sizes.items() if one.is_pinned else ():
                yield _of_batch(common, "pinned batch", one, size, count, size)
            for kind, size in one.data_bytes.items():
                yield {**common, "kind": kind, "count": 1, "requested_bytes": size, "size_bytes": size}


def frames_of(frame: FrameType | None) -> Iterable[str]:
    """Yields a stack as ``file:line:function``, innermost first, without memprof's own code."""
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(OWN_CODE):
            yield f"{code.co_filename}:{frame.f_lineno or code.co_firstlineno}:{code.co_name}"
        frame = frame.f_back


def _of_batch(
    common: dict[str, Any], kind: str, one: _Loader, size: int, count: int, taken_bytes: int
) -> dict[str, Any]:
    held = {"kind": kind, "count": count, "batches": one.in_flight}
    return {**common, **held, "requested_bytes": size, "size_bytes": taken_bytes}


def _sum(sizes: Counter[int]) -> int:
    return sum(size * count for size, count in sizes.items())


def _own_bytes(pid: int) -> int:
    """Returns the bytes of a process that it shares with no other; 0 where unknown, or it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


def data_sizes(roots: Iterable[Any]) -> dict[str, int]:
    """Returns the bytes of what is reachable from a data set, by kind; those of long containers are extrapolated.

    Args:
        roots: The data set, and what else workers are given.

    Returns:
        ``objects``: the pages that are written where a reference to an object is counted. ``arrays``: the rest of them,
        of arrays, tensors, texts and tables of containers. ``mapped``: files.
    """
    found: dict[int, _Found] = {}
    waiting: list[tuple[Any, float]] = [(root, 1.0) for root in roots]
    while waiting and len(found) < _MOST_OBJECTS:
        value, weight = waiting.pop()
        if issubclass(type(value), _OF_CODE):
            continue
        if (known := found.get(id(value))) is not None:
            known.weight = 1.0  # several have it in common
            continue
        found[id(value)] = one = _Found(weight)
        waiting.extend(_look_at(value, one, found))
    unseen = 1 + len(waiting) / max(len(found), 1)
    sums = {kind: sum(one.weight * getattr(one, kind) for one in found.values()) for kind in _KINDS}
    return {kind: round(unseen * size) for kind, size in sums.items() if size}


@dataclass
class _Found:
    """Bytes of an object by kind, and how many like it there are."""

    weight: float
    objects: int = 0
    arrays: int = 0
    mapped: int = 0


def _look_at(value: Any, one: _Found, found: dict[int, _Found]) -> Iterable[tuple[Any, float]]:
    """Fills in the bytes of an object; returns what it refers to, each with the number of those it stands for."""
    numpy: Any = sys.modules.get("numpy")
    made_by = type(value)  # isinstance would make lazy proxies load
    if issubclass(made_by, torch.Tensor):
        one.objects = _TENSOR_BYTES
        if value.layout is torch.strided and value.is_cpu:
            storage = value.untyped_storage()
            kind = "mapped" if getattr(storage, "filename", None) else "arrays"
            _add_shared(storage._cdata, one.weight, kind, storage.nbytes(), found)
        return ()
    if numpy is not None and issubclass(made_by, numpy.ndarray):
        base = value
        while isinstance(base.base, numpy.ndarray):
            base = base.base
        one.objects = sys.getsizeof(base[:0]) + _HEAD_BYTES
        is_file = isinstance(base, numpy.memmap) or isinstance(value, numpy.memmap)
        _add_shared(id(base) + 1, one.weight, "mapped" if is_file else "arrays", base.nbytes, found)
        return _sampled(value.ravel().tolist(), one.weight) if value.dtype.hasobject else ()
    size = -(-sys.getsizeof(value) // _ALIGNED) * _ALIGNED
    one.objects = min(size, 64 if issubclass(made_by, _CONTAINERS) else _PAGE_BYTES)
    one.arrays = size - one.objects
    if issubclass(made_by, dict):
        return (*_sampled(list(value), one.weight), *_sampled(list(value.values()), one.weight))
    if issubclass(made_by, _CONTAINERS):
        return _sampled(list(value), one.weight)
    return [(each, one.weight) for each in gc.get_referents(value)]


def _add_shared(key: int, weight: float, kind: str, size: int, found: dict[int, _Found]) -> None:
    """Adds memory that several tensors or arrays may show, under a number that no object has."""
    if key in found:
        found[key].weight = 1.0
    else:
        found[key] = _Found(weight, **{kind: size})


def _sampled(values: list[Any], weight: float) -> list[tuple[Any, float]]:
    """Returns evenly spaced elements of a long list, each with the number of those that it stands for."""
    step = -(-len(values) // (_SAMPLE if weight == 1 else _INNER_SAMPLE))
    chosen = values[:: step or 1]
    return [(value, weight * len(values) / len(chosen)) for value in chosen]
