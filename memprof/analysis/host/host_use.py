"""The host memory of a job: what it was divided into at its fullest, and its limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from memprof.analysis.host.host_processes import (
    FILES,
    OTHERS,
    OWN,
    RETURNS,
    HostGrowth,
    HostProcess,
    count_of,
    describe_spike,
    divide_samples,
    find_growth,
    place_of,
    summarise_processes,
)
from memprof.analysis.leaks.held import describe_copies
from memprof.analysis.leaks.leak import Leak, leaks_of_host
from memprof.analysis.report.whole_run import is_light
from memprof.machines.host_limits import SHARED, SHARED_ADVICE
from memprof.trace.schema import NONE, HostHeap, HostLimits, HostMemory, Ints, Steps
from memprof.trace.store import Trace
from memprof.units import format_bytes

#: From this share of the fullest and these bytes on, memory that was freed, but kept, is worth a sentence.
_FREED, _FREED_BYTES = 0.2, 32 * 2**20
#: Workers' memory of their own is worth a sentence from these bytes a worker on, and from this share of the job's.
_COPIED_BYTES, _COPIED = 32 * 2**20, 1 / 3
#: Bytes that a worker which forks from no trainer has after importing torch, and the share of its memory that is its
#: own then.
_IMPORTED_BYTES, _ALL_ITS_OWN = 192 * 2**20, 0.9
#: A limit is close from this share in use on.
_CLOSE = 0.9


@dataclass(frozen=True)
class HostPart:
    """What one kind of memory took when all processes together had most."""

    name: str
    bytes: int


@dataclass(frozen=True)
class HostLimit:
    """One limit on host memory when least of it was left.

    Attributes:
        name: What has the limit: the control group, the machine or /dev/shm.
        total_bytes: The limit.
        used_bytes: Of it, in use by all processes of the machine or the group.
    """

    name: str
    total_bytes: int
    used_bytes: int


class HostUse:
    """The host memory of a job on one node, from the samples of all its processes there.

    Attributes:
        limits: Each limit at its closest.
        times_us: When each round of samples was taken, in µs of Unix time, shape ``(rounds,)``.
        node: Name of the node, "" where unknown.
        copies: Sentences on tensors that are in main memory twice.
        kept: What becomes more in each trainer's Python, by process id.
        others: Those of the job's other nodes, whose processes come last in this one's.
    """

    node = ""
    copies: tuple[str, ...] = ()
    kept: Mapping[int, Sequence[Leak]] = MappingProxyType({})
    others: tuple[HostUse, ...] = ()

    def __init__(
        self, samples: HostMemory, limits: HostLimits, heaps: Mapping[int, HostHeap], recorded_us: float = -math.inf
    ) -> None:
        """Reads the samples.

        Args:
            samples: Those of every process.
            limits: Those of the limits.
            heaps: The heaps of the trainers, by process id.
            recorded_us: When the last recorded step ended. What grew until then is not looked at: a job that starts
                fills its processes, and so does recording it.
        """
        self._recorded_us = recorded_us
        samples = samples.take(np.argsort(samples.time_us, kind="stable"))
        roles = dict(zip(samples.pid.tolist(), samples.role.tolist(), strict=True))  # a worker may begin as a child
        self._samples = samples.replace(role=np.array([roles[pid] for pid in samples.pid.tolist()], dtype=object))
        self._heaps = heaps
        self._kinds = divide_samples(self._samples)
        self.times_us = self._samples.time_us[self._ends]
        self._own_processes = summarise_processes(self._samples)
        self.limits = tuple(_closest(limits))

    @staticmethod
    def of(trace: Trace) -> HostUse:
        """Reads the samples of all ranks of a trace, node by node; returns the node that used the most."""
        ranks = [trace.rank_trace(rank) for rank in trace.ranks] if len(trace.ranks) > 1 else [trace]
        nodes: dict[str, list[Trace]] = {}
        for one in ranks:
            nodes.setdefault(one.manifest.node, []).append(one)
        fullest, *others = sorted(map(HostUse._of_node, nodes.values()), key=lambda use: -use.total_bytes)
        fullest.others = tuple(others)
        return fullest

    @staticmethod
    def _of_node(ranks: Sequence[Trace]) -> HostUse:
        samples = HostMemory.joined([one.table(HostMemory) for one in ranks])
        limits = HostLimits.joined([one.table(HostLimits) for one in ranks])
        steps = Steps.joined([one.table(Steps) for one in ranks])
        ends = (steps.start_us + steps.duration_us)[steps.kind == "recorded"]
        if is_light(ranks[0]):  # of which any step is recorded
            ends = steps.start_us[:1]
        heaps = {one.manifest.pid: one.table(HostHeap) for one in ranks}
        use = HostUse(samples, limits, heaps, float(np.nanmax(ends, initial=-math.inf)))
        use.copies = tuple(filter(None, (describe_copies(one) for one in ranks)))
        use.kept = {one.manifest.pid: leaks_of_host(one) for one in ranks}
        use.node = ranks[0].manifest.node
        return use

    @property
    def processes(self) -> tuple[HostProcess, ...]:
        """Each process's maxima, node by node: trainers first, then workers, largest first."""
        return tuple(process for use in (self, *self.others) for process in use._own_processes)

    @cached_property
    def fullest(self) -> tuple[HostPart, ...]:
        """The parts when most was in use that the kernel cannot drop; none where the system reports no kinds.

        Files that are mapped come last: most of their pages can be dropped and read again.
        """
        found, rows = [], self._fullest_rows.values() if self._totals.any() else ()
        for name, sizes in self.over_time.items() if rows else ():
            own = [int(self._kinds[OWN][row]) for row in rows if self._samples.role[row] == name]
            said = f"{count_of(name, len(own))} (largest {format_bytes(max(own))})" if len(own) > 1 else name
            found.append(HostPart(said, int(sizes[self._totals.argmax()])))
        return tuple(part for part in found if part.bytes)

    @cached_property
    def over_time(self) -> dict[str, Ints]:
        """Bytes after each round of samples: each role's own, then what is not one process's. Shapes ``(rounds,)``."""
        found: dict[str, Ints] = {}
        for span, rows in self._lives.values():
            for name, column in ((str(self._samples.role[rows[-1]]), OWN), *OTHERS.items()):
                sizes = found.setdefault(name, np.zeros(len(self._ends), dtype=np.int64))
                sizes[span] += self._kinds[column][rows]
        return {name: sizes for name, sizes in sorted(found.items(), key=lambda one: place_of(one[0])) if sizes.any()}

    @cached_property
    def _totals(self) -> Ints:
        """Bytes in use by all processes after each round of samples, without mapped files. Shape ``(rounds,)``."""
        none = np.zeros(len(self._ends), dtype=np.int64)
        return sum((sizes for name, sizes in self.over_time.items() if name != FILES), none)

    @cached_property
    def _ends(self) -> Ints:
        """The last sample of each round; those of a round have one time. Shape ``(rounds,)``."""
        times = self._samples.time_us
        return np.flatnonzero(np.append(times[1:] > times[:-1], len(times) > 0))

    @cached_property
    def _lives(self) -> dict[int, tuple[slice, Ints]]:
        """The rounds in which each process is alive, and its latest sample in each of them, by its id."""
        found = {}
        for pid in np.unique(self._samples.pid).tolist():
            rows = np.flatnonzero(self._samples.pid == pid)
            rounds = np.searchsorted(self._ends, rows)
            has_ended = not self._samples.rss_bytes[rows[-1]]
            span = slice(int(rounds[0]), int(rounds[-1]) if has_ended else len(self._ends))
            if span.start < span.stop:
                found[pid] = span, rows[np.searchsorted(rows, self._ends[span], side="right") - 1]
        return found

    @cached_property
    def _fullest_rows(self) -> dict[int, int]:
        """The last row of each process when most was in use, by its id."""
        place = int(np.argmax(self._totals))
        lives = self._lives.items()
        return {pid: int(rows[place - span.start]) for pid, (span, rows) in lives if span.start <= place < span.stop}

    @property
    def total_bytes(self) -> int:
        """Bytes in use at the fullest, without mapped files."""
        return int(self._totals.max(initial=0))

    @property
    def resident_bytes(self) -> int:
        """Most resident bytes of all processes together, which count what these share once for each."""
        totals = np.zeros(len(self._ends), dtype=np.int64)
        for span, rows in self._lives.values():
            totals[span] += self._samples.rss_bytes[rows]
        return int(totals.max(initial=0))

    @property
    def limit(self) -> HostLimit | None:
        """The limit of which least was left, besides that of /dev/shm; None where none is known."""
        own = [one for one in self.limits if one.name != SHARED]
        return min(own, key=lambda one: one.total_bytes - one.used_bytes, default=None)

    @property
    def headline(self) -> str:
        """The bytes at the fullest moment, and the limit; "" where nothing is known."""
        if not self.fullest:
            return ""
        of = "" if self.limit is None else f" of {format_bytes(self.limit.total_bytes)} ({self.limit.name})"
        return f"{format_bytes(self.total_bytes)}{of}{f' on {self.node}' if self.others else ''}"

    def list_parts(self) -> str:
        """Returns the parts at the fullest moment in a line; "" where nothing is known."""
        return ", ".join(f"{part.name} {format_bytes(part.bytes)}" for part in self.fullest)

    def describe(self) -> str:
        """Returns a line on the fullest moment and the limit; "" where nothing is known."""
        return f"{self.headline}: {self.list_parts()}" if self.fullest else ""

    def warnings(self) -> Iterator[str]:
        """Yields sentences on limits that were nearly reached, and on processes that grow, of each node."""
        for use in (self, *self.others):
            yield from (f"On {use.node}: {said}" if self.others else said for said in use._warnings())

    def _warnings(self) -> Iterator[str]:
        for limit in self.limits:
            if limit.used_bytes >= _CLOSE * limit.total_bytes:
                yield _describe_limit(limit)
        for growth in self.growth:
            yield growth.describe()
        freed = "" if self.growth else self._describe_freed()
        spike = describe_spike(self._samples, self._recorded_us, self._over_us)
        yield from filter(None, (*self.copies, self._describe_workers(), freed, spike))

    def _describe_workers(self) -> str:
        """Returns that workers hold copies of their own, "" where they hold little."""
        at_once = self._fullest_rows if self.fullest else {}
        workers = (one for one in self._own_processes if one.role == "worker" and one.pid in at_once)
        own = [one.maximum_private_bytes or 0 for one in workers]
        samples = self._samples.take((self._samples.role == "worker") & (self._samples.private_bytes > 0))
        # A worker by fork has the trainer's pages in common with it; one by spawn has what it imports for itself.
        is_forked = (samples.private_bytes < _ALL_ITS_OWN * samples.heap_bytes).any()
        least = _COPIED_BYTES if is_forked else _IMPORTED_BYTES + _COPIED_BYTES
        if len(own) < 2 or min(own) < least or sum(own) < _COPIED * self.total_bytes:
            return ""
        return (
            f"{len(own)} workers hold {format_bytes(sum(own))}, at least {format_bytes(min(own))} each, that no other "
            "process shares: copies of the data set (Python copies a page when it counts references to an object in "
            "it; arrays and tensors are shared), or what each loads."
        )

    def _describe_freed(self) -> str:
        # Heaps are sampled at the ends of steps: what was free then may be in use at the fullest moment, inside a step.
        freed = sum(max(int(one.free_bytes[len(one) // 2 :].min()), 0) for one in self._heaps.values() if len(one))
        if freed < max(_FREED_BYTES, _FREED * self.total_bytes):
            return ""
        return (
            f"At the ends of steps, at least {format_bytes(freed)} of host memory was free, but kept by the C "
            f"library's heap; {RETURNS} return such memory."
        )

    @cached_property
    def growth(self) -> tuple[HostGrowth, ...]:
        """The processes that grow, those of one role together."""
        times = self._samples.time_us
        followed = self._samples.take((times > self._recorded_us) & (times <= self._over_us))
        return find_growth(followed, self._heaps, self.kept)

    @cached_property
    def _over_us(self) -> float:
        """When the last heap was sampled without a count of tensors, as at the job's end: when the last step ended."""
        ends = [heap.time_us[heap.held_bytes == NONE] for heap in self._heaps.values()]
        return max((float(times[-1]) for times in ends if len(times)), default=math.inf)


def _closest(limits: HostLimits) -> Iterator[HostLimit]:
    for name in dict.fromkeys(limits.name.tolist()):
        own = limits.take(limits.name == name)
        row = int(np.argmin(own.total_bytes - own.used_bytes))
        yield HostLimit(name, int(own.total_bytes[row]), int(own.used_bytes[row]))


def _describe_limit(limit: HostLimit) -> str:
    full = f"{format_bytes(limit.used_bytes)} of {format_bytes(limit.total_bytes)} in use"
    if limit.name == SHARED:
        return f"{SHARED} was nearly full, {full}: {SHARED_ADVICE}"
    end = "once it is used up, the kernel kills the largest process"
    return f"The memory of the {limit.name} was nearly full, {full}: {end}."
