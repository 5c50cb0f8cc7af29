"""Finds the live objects of a type, and follows storages by weak references.

What is followed replaces native events if those are missing, and complements them for memory allocated before they
started.
"""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from heapq import nlargest
from itertools import chain, compress, count, islice, repeat
from operator import is_, not_, or_
from typing import Any

import torch
from torch.optim import Optimizer

from memprof.recorder.clock import clock_ns
from memprof.recorder.log import RawLog
from memprof.recorder.memory.tensor_memory import outside_span, owned_span
from memprof.recorder.profiler.native import device_name
from memprof.trace.files.spool import HEARD

_TURNS: tuple[Any, Any] = (iter, reversed)
#: Types, by identity, whose objects hold no array, or are looked through by themselves.
_NOT_FOLLOWED = set(
    map(
        id,
        (
            *(list, deque, dict, set, frozenset, type, property, staticmethod, classmethod),
            *(types.FunctionType, types.ModuleType, types.BuiltinFunctionType, types.GetSetDescriptorType),
            *(types.MethodDescriptorType, types.WrapperDescriptorType, types.GenericAlias, weakref.ref),
        ),
    )
)
#: Containers that are compared, of which so many elements are sized, through so many references, at most this many.
_MOST_CONTAINERS, _LEVELS, _MOST_SIZED = 32, 4, 4096
#: What elements refer to and have in common; how builtin objects are sized without code of the job; and what the
#: collector adds to each.
_SHARED = (type, types.ModuleType, types.FunctionType, types.CodeType, types.FrameType, type(None), bool)
_SIZES: dict[type, Any] = {kind: kind.__sizeof__ for kind in (list, dict, set, tuple, str, bytes, int, float, deque)}
_HEADER_BYTES = 16

_has_frozen = False
_old_objects = 0  # of the collector's oldest generation, at the first search for arrays
#: Types whose objects were looked up for all searches of a moment, and these objects.
_looked_up: tuple[tuple[type, ...], list[Any]] | None = None


@contextmanager
def one_search(kinds: tuple[type, ...], others: Callable[[], list[Any]]) -> Iterator[None]:
    """Has all searches for some types look through the objects once: those that there are now.

    Args:
        kinds: The types.
        others: Returns objects that are looked at too where the job has frozen some, which the collector does not list.
    """
    global _looked_up  # noqa: PLW0603 - one garbage collector per process
    found = {id(one): one for one in live_objects(kinds)}
    if gc.get_freeze_count():
        found.update((id(one), one) for one in others() if issubclass(type(one), kinds))
    _looked_up = kinds, list(found.values())
    try:
        yield
    finally:
        _looked_up = None


def freeze_imports() -> None:
    """Leaves all objects so far out of garbage collections and of searches for live objects.

    Of the 300,000 objects that are made while torch is imported, none is a tensor, a module or an optimizer; searches
    for these took a tenth of the time of a short dry run. If there is a tensor, nothing is left out.
    """
    global _has_frozen  # noqa: PLW0603 - one garbage collector per process
    gc.collect()
    if not live_objects(torch.Tensor):
        gc.freeze()
        _has_frozen = True


def find_referrers(objects: Sequence[Any]) -> list[Any]:
    """Returns the objects that refer directly to some others, such as the dictionary of the script's variables.

    What `freeze_imports` left out is searched from now on.
    """
    global _has_frozen  # noqa: PLW0603 - one garbage collector per process
    if _has_frozen:
        gc.unfreeze()
        _has_frozen = False
    return gc.get_referrers(*objects)


def live_optimizers(*, is_late: bool) -> list[Any]:
    """Lists the optimizers alive when a recording begins.

    Args:
        is_late: Whether the process ran before, as in a notebook. Optimizers of earlier cells that only reference
            cycles keep alive are collected first: a step would wait for their updates.
    """
    found = live_objects(Optimizer)
    if is_late and len(found) > 1:
        del found  # which would keep them alive
        gc.collect()
        found = live_objects(Optimizer)
    return found


def live_objects(kind: type | tuple[type, ...]) -> list[Any]:
    """Lists the objects of a type (or of one of several, or a subclass) tracked by the garbage collector, oldest first.

    The collector keeps its objects in the order of their creation, in each of its generations; the oldest is read
    first. A collection in between would move objects into a generation that has been read.

    Checks the type, never `__class__`: lazy proxies load the object they stand for when it is read.

    Nothing in the search is Python code, so that no other thread runs while all objects are referenced: some may be
    tuples still being filled from a generator, for which Python raises SystemError if anything else references them.
    """
    if _looked_up is not None and set(kind if isinstance(kind, tuple) else (kind,)) <= set(_looked_up[0]):
        return [one for one in _looked_up[1] if issubclass(type(one), kind)]
    generations = reversed(range(len(gc.get_count())))
    # Each list twice, and not by `tee`, whose buffers would find each other: all that they hold would be kept.
    lists = chain.from_iterable(map(repeat, map(gc.get_objects, generations), repeat(2)))
    collects = gc.isenabled()
    gc.disable()
    try:
        tests = map(map, repeat(issubclass), map(map, repeat(type), lists), repeat(repeat(kind)))
        return list(chain.from_iterable(map(compress, lists, tests)))
    finally:
        if collects:
            gc.enable()


def arrays_held() -> list[Any]:
    """Lists numpy's arrays that other objects hold, each once; a view counts as the array it shows.

    The collector does not follow arrays. Of lists, deques and dictionaries only the first and the last element tell
    whether to look at the others: a list of numbers may have millions. Of all other objects (tuples, instances with
    attributes, closures), what they refer to is looked at, of those older than the first search only then. As in
    `live_objects`, what reads them is no Python code.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return []
    kind, roots = numpy.ndarray, {}
    collects = gc.isenabled()
    gc.disable()
    try:
        for array in (*_in_containers(kind), *_in_others(kind)):
            while type(array.base) is kind:
                array = array.base  # noqa: PLW2901 - a view's
            if array.base is None and array.nbytes:
                roots[id(array)] = array
    finally:
        if collects:
            gc.enable()
    return list(roots.values())


def _in_containers(kind: type) -> list[Any]:
    """Returns the objects of exactly a type in lists, deques and dictionaries."""
    containers = live_objects((list, deque, dict))
    found: list[Any] = []
    held: Any
    for held in (list, deque, dict):
        alike = list(compress(containers, map(is_, map(type, containers), repeat(held))))
        if held is dict:  # the collector does not follow one of numbers, texts and arrays alone
            inner = _of_type(chain.from_iterable(map(dict.values, alike)), dict)
            alike += compress(inner, map(not_, map(gc.is_tracked, inner)))
        values = (map(dict.values, alike) if held is dict else alike for _ in range(3))
        ends = (
            map(next, map(turn, one), repeat(None))
            for turn, one in zip(_TURNS, (next(values), next(values)), strict=True)
        )
        first, last = (map(is_, map(type, end), repeat(kind)) for end in ends)
        found += _of_type(chain.from_iterable(compress(next(values), map(or_, first, last))), kind)
    containers.clear()  # it is a list, and has found itself: nothing would free it, nor what it holds
    return found


def _in_others(kind: type) -> list[Any]:
    """Returns the objects of exactly a type to which others refer that are younger than the first search."""
    global _old_objects  # noqa: PLW0603 - one garbage collector per process
    *younger, oldest = range(len(gc.get_count()))
    old = islice(gc.get_objects(oldest), _old_objects, None)
    # One generation at a time: lists of all of them would find each other.
    objects = chain(old, chain.from_iterable(map(gc.get_objects, reversed(younger))))
    twice = chain.from_iterable(map(repeat, objects, repeat(2)))
    others = compress(twice, map(not_, map(_NOT_FOLLOWED.__contains__, map(id, map(type, twice)))))
    found = _of_type(chain.from_iterable(map(gc.get_referents, others)), kind)
    _old_objects = _old_objects or len(gc.get_objects(oldest))
    return found


def _of_type(values: Iterator[Any], kind: type) -> list[Any]:
    twice = chain.from_iterable(map(repeat, values, repeat(2)))
    return list(compress(twice, map(is_, map(type, twice), repeat(kind))))


def largest_containers() -> list[Any]:
    """Lists the lists, deques, dictionaries and sets of most elements, largest first; without subclasses."""
    kinds = (list, deque, dict, set)
    found = live_objects(kinds)
    alike = list(compress(found, map(set(map(id, kinds)).__contains__, map(id, map(type, found)))))
    found.clear()
    largest = nlargest(_MOST_CONTAINERS, zip(map(len, alike), count(), strict=False))
    chosen = [alike[place] for _, place in largest]
    alike.clear()
    return chosen


def entries_bytes(container: Any) -> int:
    """Returns about the bytes of a container's elements, by some of them and what these refer to."""
    values = list(islice(container.values() if type(container) is dict else container, _MOST_CONTAINERS))
    seen: dict[int, Any] = {}
    level = values
    for _ in range(_LEVELS):
        fresh = [one for one in level if id(one) not in seen and not issubclass(type(one), _SHARED)][:_MOST_SIZED]
        seen |= {id(one): one for one in fresh}
        level = gc.get_referents(*fresh)
    sizes = sum(_SIZES.get(type(one), object.__sizeof__)(one) + _HEADER_BYTES for one in seen.values())
    return int(sizes) * len(container) // max(len(values), 1)


def outermost_modules() -> list[torch.nn.Module]:
    """Lists the live modules that no other module contains."""
    modules = [module for module in live_objects(torch.nn.Module) if "_modules" in module.__dict__]
    inner = {id(child) for module in modules for child in module._modules.values() if child is not None}
    return [module for module in modules if id(module) not in inner]


class _Reference(weakref.ref[torch.UntypedStorage]):
    """A weak reference that identifies its storage after it is gone."""

    __slots__ = ("key",)
    key: int


class StorageWatch:
    """Logs allocations and frees of the storages passed to it.

    It does not see memory that kernels allocate and free within one operator.

    Attributes:
        only: Type of the device whose storages are followed; "" for all.
        owned_span: Returns the address and bytes of a tensor's storage.
        name: Name of this event source in the recording.
    """

    name = "dispatch"
    needs_outputs = True

    def __init__(self, log: RawLog) -> None:
        self._log = log
        self._alive: dict[int, tuple[_Reference, int, int, str]] = {}
        self.only = ""
        self.owned_span: Callable[[torch.Tensor], tuple[int, int]] = owned_span
        self.is_running = False
        self.on_change: Callable[[int], None] | None = None

    def start(self) -> bool:
        """Starts following."""
        self.is_running = True
        return True

    def cut(self) -> None:
        """Logs a marker that all events so far are logged; each is logged as it happens."""
        self._log.events.extend((clock_ns(), *HEARD))

    def stop(self) -> None:
        """Stops logging; storages are still followed, so that live ones are known when logging restarts."""
        if self.is_running:
            self.cut()
        self.is_running = False

    def abandon(self) -> None:
        """Stops for good, without logging: the recording is over, or this is a forked child."""
        self.is_running = False
        self._alive.clear()

    def watch(self, tensor: torch.Tensor, moment_ns: int) -> None:
        """Logs a tensor's storage as allocated at a given time, unless it is known."""
        if self.only and tensor.device.type != self.only:
            return
        device = "" if tensor.device.type == "cpu" else device_name(tensor.device)
        address, size = self.owned_span(tensor)
        known = self._follow(tensor, address, size, device)
        if known == (address, size):
            return
        if known is not None:  # it was resized
            self._add(moment_ns, known[0], -known[1], device)
        self._add(moment_ns, address, size, device)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Logs that a followed storage was resized outside any operator."""
        known = self._alive.get(storage._cdata)
        if known is None or known[2] == storage.nbytes():
            return
        reference, address, size, device = known
        self._alive[storage._cdata] = (reference, address, storage.nbytes(), device)
        if self.is_running:
            now_ns = clock_ns()
            for change in (-size, storage.nbytes()):
                if change:
                    self._add(now_ns, address, change, device)

    def remember(self, tensor: torch.Tensor) -> None:
        """Follows the storage of an existing tensor: its free is logged, its allocation is not."""
        if not self.only or tensor.device.type == self.only:
            device = "" if tensor.device.type == "cpu" else device_name(tensor.device)
            self._follow(tensor, *self.owned_span(tensor), device)

    def _follow(self, tensor: torch.Tensor, address: int, size: int, device: str) -> tuple[int, int] | None:
        """Follows a tensor's storage; returns its previous address and size, None if it is new."""
        if not address:
            return address, size
        storage = tensor.untyped_storage()
        key = storage._cdata  # unique among live storages
        known = self._alive.get(key)
        if known is not None:
            reference = known[0]
        else:
            reference = _Reference(storage, self._died)
            reference.key = key
        self._alive[key] = (reference, address, size, device)
        return None if known is None else known[1:3]

    def _add(self, moment_ns: int, address: int, change: int, device: str) -> None:
        if device:
            number = self._log.intern("devices", device)
            self._log.device_events.extend((moment_ns, number, address, change, -1, -1))
        else:
            self._log.events.extend((moment_ns, address, change, -1))
        if self.on_change is not None:
            self.on_change(change)

    def _died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(reference, _Reference)
        known = self._alive.pop(reference.key, None)
        if known is not None and known[2] and self.is_running:
            self._add(clock_ns(), known[1], -known[2], known[3])


class OutsideWatch(StorageWatch):
    """Follows what training keeps in memory that torch's allocator does not own, each address once.

    Attributes:
        alive_bytes: Bytes of the storages that are alive.
    """

    def __init__(self, log: RawLog) -> None:
        super().__init__(log)
        self.owned_span = outside_span
        self.alive_bytes = 0
        self._addresses: set[int] = set()

    def spans(self) -> list[tuple[int, int]]:
        """Returns address and bytes of the storages that are alive."""
        return [(address, size) for _, address, size, _ in list(self._alive.values())]

    def _follow(self, tensor: torch.Tensor, address: int, size: int, device: str) -> tuple[int, int] | None:
        if not address or address in self._addresses:
            return address, size
        self._addresses.add(address)
        self.alive_bytes += size
        return super()._follow(tensor, address, size, device)

    def _died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(reference, _Reference)
        known = self._alive.get(reference.key)
        if known is not None:
            self._addresses.discard(known[1])
            self.alive_bytes -= known[2]
        super()._died(reference)
