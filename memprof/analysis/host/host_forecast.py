"""The host memory that a job will take, as its dry run shows it, and which DataLoader to change if it is too much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from memprof.analysis.host.host_use import HostLimit, HostUse
from memprof.analysis.report.sources import find_sources
from memprof.machines.host_limits import SHARED
from memprof.replay.live import live_bytes
from memprof.replay.rounding import rounded_when_pinned
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.schema import HostMemory, HostNeeds, Stacks
from memprof.trace.store import Trace
from memprof.trace.whole_steps import has_whole_step
from memprof.units import format_bytes, format_bytes_between, format_count

#: A worker by fork copies up to these bytes of what only a dry run imported: 8 MiB were measured.
_OF_DRY_RUN = 12 * 2**20
#: What libraries that compute on the CPU take besides tensors, which a dry run does not: 26 to 80 MiB were measured.
_OF_COMPUTING = 128 * 2**20


@dataclass(frozen=True)
class HostForecastPart:
    """What one kind of host memory will take.

    Attributes:
        name: What it is.
        least_bytes: Fewest bytes of it at the fullest moment.
        most_bytes: Most bytes.
        basis: What the bounds rest on, a clause.
    """

    name: str
    least_bytes: int
    most_bytes: int
    basis: str


@dataclass
class Loader:
    """A DataLoader of the job.

    Attributes:
        line: Where it is made, ``file:line``; "" where unknown.
        workers: Its workers.
        in_flight: Batches in flight at most.
        batch_bytes: A batch in shared memory.
        pinned_bytes: A batch as it is pinned; 0 where it is not.
        worker_bytes: Memory of its own that a worker had.
        data_bytes: The data set, by kind of `HostNeeds`.
        is_forked: Whether workers are forked.
    """

    line: str = ""
    workers: int = 0
    in_flight: int = 0
    batch_bytes: int = 0
    pinned_bytes: int = 0
    worker_bytes: int = 0
    data_bytes: dict[str, int] = field(default_factory=dict)
    is_forked: bool = True

    @property
    def prefetch(self) -> int:
        """Its ``prefetch_factor``; one as small that gives the same batches in flight, where there are few batches."""
        return max((self.in_flight - 2) // max(self.workers, 1), 1)

    @property
    def at(self) -> str:
        """Where it is made, as a clause."""
        return f"the DataLoader at {self.line}" if self.line else "the DataLoader"


def loaders_of(trace: Trace, use: HostUse) -> tuple[Loader, ...]:
    """Returns the DataLoaders with workers or pinned batches, in order; workers have what samples show."""
    needs, settings = trace.table(HostNeeds), trace.manifest.machine.allocator_settings
    sources = find_sources(trace.table(Stacks))
    found: dict[int, Loader] = {}
    for row in range(len(needs)):
        kind, size, count = str(needs.kind[row]), int(needs.size_bytes[row]), int(needs.count[row])
        if kind == "pinned":
            continue
        one = found.setdefault(int(needs.loader[row]), Loader())
        source = sources.of_stack(int(needs.stack_id[row]))
        one.line = source.place if source is not None else ""
        if kind in ("forked", "started"):
            one.workers, one.worker_bytes, one.is_forked = count, size, kind == "forked"
        elif kind == "batch":
            one.in_flight = int(needs.batches[row])
            one.batch_bytes += count * size
        elif kind == "pinned batch":
            one.in_flight = int(needs.batches[row])
            one.pinned_bytes += count * int(rounded_when_pinned(needs.requested_bytes[row : row + 1], settings)[0])
        else:
            one.data_bytes[kind] = size
    sampled = [one.maximum_private_bytes or 0 for one in use.processes if one.role == "worker"]
    for one in found.values():
        one.worker_bytes = one.worker_bytes or max(sampled, default=0)
    return tuple(found.values())


class HostForecast:
    """The host memory that a dry-run job will take on one node.

    Attributes:
        loaders: Its DataLoaders.
        parts: What it is made of.
        limit: The limit of the dry run's machine of which least was left, besides /dev/shm; None where none is known.
        shared_limit: That of /dev/shm.
    """

    def __init__(self, trace: Trace, use: HostUse) -> None:
        """Reads a dry run.

        Args:
            trace: The dry run.
            use: The host memory of its own processes.
        """
        self.loaders = loaders_of(trace, use)
        self._own_bytes = use.total_bytes
        self.limit = use.limit
        self.shared_limit = next((one for one in use.limits if one.name == SHARED), None)
        self.parts = tuple(part for part in self._parts(trace, use) if part.most_bytes)

    @staticmethod
    def of(trace: Trace, use: HostUse) -> HostForecast | None:
        """Returns the forecast of a dry run; None for other recordings."""
        return HostForecast(trace, use) if trace.manifest.backend.name == DRY_RUN and use.fullest else None

    def _parts(self, trace: Trace, use: HostUse) -> Iterator[HostForecastPart]:
        ranks = max(len(trace.ranks), 1)
        of_ranks = f", of each of {ranks} ranks" if ranks > 1 else ""
        tensors = 0
        if trace.manifest.machine.device_kind == "cpu" and has_whole_step(trace):
            tensors = int(live_bytes(trace.fullest_step()).during.max(initial=0))
        samples = trace.table(HostMemory)  # of what it shares with workers by fork, too
        own = int(samples.heap_bytes[samples.role == "trainer"].max(initial=0))
        data = sum(size for one in self.loaders[:1] for kind, size in one.data_bytes.items() if kind != "mapped")
        words = "its data set to all that its dry run had"
        if tensors:
            words = "its data set and tensors, to all that its dry run had, tensors twice (freed memory may be kept), "
            words += f"and {format_bytes(_OF_COMPUTING)} of libraries that compute"
        most = own + (2 * tensors + _OF_COMPUTING if tensors else 0)
        yield HostForecastPart("trainer", ranks * (data + tensors), ranks * most, words + of_ranks)
        for one in self.loaders:
            if one.workers:
                yield _part_of_workers(one, ranks)
                most, words = one.in_flight, f"{one.in_flight} batches of {format_bytes(one.batch_bytes)} in flight"
                least = min(one.workers, most)
                name = f"shared batches ({one.line})"
                words = f"one for each worker to {words}"
                yield HostForecastPart(
                    name, ranks * least * one.batch_bytes, ranks * most * one.batch_bytes, words + of_ranks
                )
            if one.pinned_bytes:
                words = f"one to {one.in_flight} batches, rounded by torch"
                most = one.in_flight * one.pinned_bytes
                yield HostForecastPart(
                    f"pinned batches ({one.line})", ranks * one.pinned_bytes, ranks * most, words + of_ranks
                )
        yield from self._pinned(trace, ranks)

    @staticmethod
    def _pinned(trace: Trace, ranks: int) -> Iterator[HostForecastPart]:
        needs, sources = trace.table(HostNeeds), find_sources(trace.table(Stacks))
        lines: dict[str, list[int]] = {}
        for row in np.flatnonzero(needs.kind == "pinned").tolist():
            source = sources.of_stack(int(needs.stack_id[row]))
            found = lines.setdefault(source.place if source is not None else "", [0, 0])
            found[0] += int(needs.count[row] * needs.requested_bytes[row])
            found[1] += int(needs.count[row] * needs.size_bytes[row])
        for line, (asked, taken) in lines.items():
            words = f"{format_bytes(asked)} requested, rounded by torch"
            yield HostForecastPart(f"pinned ({line})", ranks * taken, ranks * taken, words)

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """Fewest and most bytes of all parts together."""
        return sum(one.least_bytes for one in self.parts), sum(one.most_bytes for one in self.parts)

    @property
    def shared_bytes(self) -> tuple[int, int]:
        """Fewest and most bytes of batches in /dev/shm."""
        own = [one for one in self.parts if one.name.startswith("shared batches")]
        return sum(one.least_bytes for one in own), sum(one.most_bytes for one in own)

    @property
    def free_bytes(self) -> int | None:
        """Bytes that the machine of the dry run has for the job; None where unknown."""
        return None if self.limit is None else self.limit.total_bytes - self.limit.used_bytes + self._own_bytes

    @property
    def margin_bytes(self) -> int | None:
        """Bytes that stay free there at the least; negative where the job may be killed. None where unknown."""
        return None if self.free_bytes is None else self.free_bytes - self.bounds[1]

    @property
    def headline(self) -> str:
        """The bytes to expect, and those that the machine of the dry run has for them."""
        said = format_bytes_between(*self.bounds)
        if self.limit is None or self.free_bytes is None:
            return said
        return f"{said}; {format_bytes(self.free_bytes)} of {format_bytes(self.limit.total_bytes)} free here"

    def warnings(self) -> Iterator[str]:
        """Yields a sentence for each limit of this machine that may be exceeded, with the numbers to set."""
        free = self.free_bytes
        if free is not None and self.limit is not None and self.bounds[1] > free:
            cure = describe_fewer_workers(self.loaders, self.bounds[1] - free)
            yield _describe_short("host memory", self.bounds, free, self.limit, cure)
        shared, limit = self.shared_bytes, self.shared_limit
        if limit is not None and shared[1] > (left := limit.total_bytes - limit.used_bytes):
            yield _describe_short(SHARED, shared, left, limit, describe_smaller_prefetch(self.loaders, left))


def _part_of_workers(one: Loader, ranks: int) -> HostForecastPart:
    objects = one.data_bytes.get("objects", 0) if one.is_forked else 0
    name = f"{format_count(one.workers, 'worker')} ({one.line})"
    words = f"{format_bytes(one.worker_bytes)} each as measured in the dry run, without what that imported"
    words += ", to the same with the samples of a batch"
    if objects >= 2**20:
        words += f" and copies of all {format_bytes(objects)} of Python objects in the data set"
    counted, least = ranks * one.workers, max(one.worker_bytes - _OF_DRY_RUN, 0)
    most = one.worker_bytes + 2 * one.batch_bytes + objects
    return HostForecastPart(name, counted * least, counted * most, words)


def _describe_short(what: str, bounds: tuple[int, int], free: int, limit: HostLimit, cure: str) -> str:
    verb = "needs" if bounds[0] > free else "may need"
    end = "the kernel would kill it" if what != SHARED else "a worker would end with a bus error"
    return (
        f"The job {verb} {format_bytes_between(*bounds)} of {what}, and this machine has {format_bytes(free)} free of "
        f"{format_bytes(limit.total_bytes)} ({limit.name}): {end}.{cure and f' {cure}'}"
    )


def describe_fewer_workers(loaders: Sequence[Loader], short_bytes: int) -> str:
    """Returns which DataLoader needs fewer workers, and how many free the bytes that are short; "" where none can."""
    largest = max(loaders, key=lambda one: one.workers * one.worker_bytes, default=None)
    if largest is None or not largest.workers or not largest.worker_bytes:
        return ""
    each = largest.worker_bytes + largest.prefetch * largest.batch_bytes
    fewer = min(-(-short_bytes // each), largest.workers)
    freed = format_bytes(fewer * each)
    left = "" if fewer * each >= short_bytes else f", {format_bytes(short_bytes - fewer * each)} less than needed"
    return (
        f"In {largest.at}, num_workers={largest.workers - fewer} instead of {largest.workers} frees {freed}{left}: "
        f"each worker has {format_bytes(largest.worker_bytes)} of its own."
    )


def describe_smaller_prefetch(loaders: Sequence[Loader], room_bytes: int) -> str:
    """Returns which DataLoader needs fewer batches in flight for them to fit in shared memory; "" where none can.

    Args:
        loaders: The job's.
        room_bytes: Bytes that are free there.
    """
    largest = max(loaders, key=lambda one: one.in_flight * one.batch_bytes, default=None)
    if largest is None or not largest.batch_bytes:
        return ""
    others = sum(one.in_flight * one.batch_bytes for one in loaders if one is not largest)
    batches = max((room_bytes - others) // largest.batch_bytes - 2, 0)
    workers = min(largest.workers, batches)
    if not workers:
        return f"In {largest.at}, not even one worker's batches fit: num_workers=0, or smaller batches."
    prefetch = min(max(batches // workers, 1), largest.prefetch)
    fewer = f"num_workers={workers} instead of {largest.workers} and " if workers < largest.workers else ""
    return (
        f"In {largest.at}, {fewer}prefetch_factor={prefetch} instead of {largest.prefetch} keeps "
        f"{workers * prefetch + 2} batches of {format_bytes(largest.batch_bytes)} in flight."
    )
