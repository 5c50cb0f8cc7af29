"""The host memory of a job's processes: what it was divided into at its fullest, its limits, and what grew."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memprof.trace.schema import NONE, Floats, HostHeap, HostLimits, HostMemory, Ints, Steps
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_count

#: The display order of roles; any other comes last.
ROLES = ("trainer", "worker", "child")
_SHM = "/dev/shm"
#: A limit is close from this share in use on.
_CLOSE = 0.9
#: Growth is looked for after this share of a process's life, in at least this many samples, and told from these bytes
#: and this share of what there was.
_SETTLED, _LEAST_SAMPLES, _GROWTH_BYTES, _GROWTH = 1 / 3, 6, 8 * 2**20, 0.05
#: Share of the growth that the second half of the samples must have: what fills once does not go on.
_GOES_ON = 0.3
#: Bytes that a small object of Python takes at the least, and usual ones with what they refer to.
_BLOCK_BYTES = 64


@dataclass(frozen=True)
class HostProcess:
    """Peak main memory of one process of the job.

    Attributes:
        role: ``trainer``, ``worker`` or ``child``.
        pid: Its process id.
        maximum_rss_bytes: Peak resident memory, including pages shared with other processes.
        maximum_private_bytes: Peak private resident memory; None where the system does not report it.
    """

    role: str
    pid: int
    maximum_rss_bytes: int
    maximum_private_bytes: int | None


@dataclass(frozen=True)
class HostPart:
    """What one kind of memory took when all processes together had most.

    Attributes:
        name: What it is.
        bytes: Bytes of it.
    """

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


@dataclass(frozen=True)
class HostGrowth:
    """A process, or all of a role, whose memory of its own kept growing.

    Attributes:
        role: Its role.
        processes: How many of that role grow.
        first_bytes: What each had once it had settled, on average.
        last_bytes: What each had at the end.
        seconds: The time between.
        cause: What has grown inside a trainer; "" where unknown.
    """

    role: str
    processes: int
    first_bytes: int
    last_bytes: int
    seconds: float
    cause: str

    def describe(self) -> str:
        """Returns a sentence."""
        who = f"the {self.role}" if self.processes == 1 else f"{self.processes} {self.role}s"
        each, grow = ("each ", "grow") if self.processes > 1 else ("", "grows")
        grown = self.last_bytes - self.first_bytes
        rate = f"{format_bytes(round(grown / max(self.seconds, 1e-9)))} a second"
        span = f"{each}from {format_bytes(self.first_bytes)} to {format_bytes(self.last_bytes)}, {rate}"
        return f"Host memory of {who} {grow} {span}{self.cause and f': {self.cause}'}."


class HostUse:
    """The host memory of a job, from the samples of all its processes.

    Attributes:
        processes: Each process's maxima: trainers first, then workers, largest first.
        limits: Each limit at its closest.
    """

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
        self._samples = samples.take(np.argsort(samples.time_us, kind="stable"))
        self._heaps = heaps
        self.processes = summarise_processes(self._samples)
        self.limits = tuple(_closest(limits))

    @staticmethod
    def of(trace: Trace) -> HostUse:
        """Reads the samples of all ranks of a trace."""
        ranks = [trace.rank_trace(rank) for rank in trace.ranks] if len(trace.ranks) > 1 else [trace]
        samples = HostMemory.joined([one.table(HostMemory) for one in ranks])
        limits = HostLimits.joined([one.table(HostLimits) for one in ranks])
        steps = Steps.joined([one.table(Steps) for one in ranks])
        ends = (steps.start_us + steps.duration_us)[steps.kind == "recorded"]
        heaps = {one.manifest.pid: one.table(HostHeap) for one in ranks}
        return HostUse(samples, limits, heaps, float(np.nanmax(ends, initial=-math.inf)))

    @cached_property
    def _own_bytes(self) -> Ints:
        """Bytes of no file of each sample's process. Shape (samples,).

        Between two divisions into kinds, a change of the resident bytes counts as one of these.
        """
        own = np.full(len(self._samples), NONE, dtype=np.int64)
        for pid in np.unique(self._samples.pid).tolist():
            rows = np.flatnonzero(self._samples.pid == pid)
            one = self._samples.take(rows)
            known = np.flatnonzero(one.anonymous_bytes != NONE)
            if not len(known):
                continue
            last = known[np.maximum(np.searchsorted(known, np.arange(len(rows)), side="right") - 1, 0)]
            own[rows] = np.maximum(one.anonymous_bytes[last] + one.rss_bytes - one.rss_bytes[last], 0)
        return own

    @cached_property
    def fullest(self) -> tuple[HostPart, ...]:
        """The parts when most was in use that the kernel cannot drop; none where the system reports no kinds.

        Files that are mapped come last: most of their pages can be dropped and read again.
        """
        best: dict[int, int] = {}
        most = -1
        for alive in self._rounds():
            total = sum(self._bytes_of(row) for row in alive.values())
            if total > most:
                most, best = total, dict(alive)
        return tuple(self._parts(list(best.values()))) if most > 0 else ()

    @property
    def total_bytes(self) -> int:
        """Bytes in use at the fullest, without mapped files."""
        return sum(part.bytes for part in self.fullest if part.name != _FILES)

    @property
    def limit(self) -> HostLimit | None:
        """The limit of which least was left, besides that of /dev/shm; None where none is known."""
        own = [one for one in self.limits if one.name != _SHM]
        return min(own, key=lambda one: one.total_bytes - one.used_bytes, default=None)

    def describe(self) -> str:
        """Returns a line on the fullest moment and the limit; "" where nothing is known."""
        if not self.fullest:
            return ""
        parts = ", ".join(f"{part.name} {format_bytes(part.bytes)}" for part in self.fullest)
        of = "" if self.limit is None else f" of {format_bytes(self.limit.total_bytes)} ({self.limit.name})"
        return f"{format_bytes(self.total_bytes)}{of}: {parts}"

    def warnings(self) -> Iterator[str]:
        """Yields sentences on limits that were nearly reached, and on processes that grow."""
        for limit in self.limits:
            if limit.used_bytes >= _CLOSE * limit.total_bytes:
                yield _describe_limit(limit)
        for growth in self.growth:
            yield growth.describe()

    @cached_property
    def growth(self) -> tuple[HostGrowth, ...]:
        """The processes that grow, those of one role together."""
        by_role: dict[str, list[HostGrowth]] = {}
        times = self._samples.time_us
        over_us = max((float(heap.time_us[-1]) for heap in self._heaps.values() if len(heap)), default=math.inf)
        is_looked_at = (times > self._recorded_us) & (times <= over_us) & (self._samples.heap_bytes != NONE)
        for process in self.processes:
            rows = np.flatnonzero(is_looked_at & (self._samples.pid == process.pid))
            found = _grown(self._samples.time_us[rows], self._samples.heap_bytes[rows])
            if found is None:
                continue
            first, last, from_us, to_us = found
            cause = _cause(self._heaps.get(process.pid, HostHeap.empty()), from_us, to_us, last - first)
            growth = HostGrowth(process.role, 1, first, last, (to_us - from_us) / 1e6, cause)
            by_role.setdefault(process.role, []).append(growth)
        return tuple(_joined(alike) for alike in by_role.values())

    def _rounds(self) -> Iterator[dict[int, int]]:
        """Yields the last row of each process that is alive, by its id, after every sample."""
        samples = self._samples
        alive: dict[int, int] = {}
        divided: set[int] = set()
        for row, (pid, is_division) in enumerate(
            zip(samples.pid.tolist(), (samples.anonymous_bytes != NONE).tolist(), strict=True)
        ):
            if is_division and pid in divided:  # the next round: whoever was not in this one has ended
                alive = {one: at for one, at in alive.items() if one in divided}
                divided = set()
            if is_division:
                divided.add(pid)
            alive[pid] = row
            yield alive

    def _bytes_of(self, row: int) -> int:
        samples = self._samples
        others = max(int(samples.shared_bytes[row]), 0) + max(int(samples.swapped_bytes[row]), 0)
        return max(int(self._own_bytes[row]), 0) + others

    def _parts(self, rows: list[int]) -> Iterator[HostPart]:
        roles = self._samples.role[rows].tolist()
        own = np.maximum(self._own_bytes[rows], 0)
        for role in sorted(set(roles), key=_place):
            sizes = own[[one == role for one in roles]]
            if not sizes.sum():
                continue
            name = role if len(sizes) == 1 else f"{len(sizes)} {role}s (largest {format_bytes(int(sizes.max()))})"
            yield HostPart(name, int(sizes.sum()))
        others = {"shared memory": "shared_bytes", "swapped out": "swapped_bytes", _FILES: "file_bytes"}
        for name, column in others.items():
            size = int(np.maximum(getattr(self._samples, column)[rows], 0).sum())
            if size:
                yield HostPart(name, size)


_FILES = "mapped files"


def summarise_processes(samples: HostMemory) -> tuple[HostProcess, ...]:
    """Returns each process's maxima over the whole job: the trainer first, then the workers, largest first.

    Args:
        samples: Samples of every process.
    """
    processes = []
    for pid in np.unique(samples.pid).tolist():
        own = samples.take(samples.pid == pid)
        private = int(own.private_bytes.max())
        processes.append(
            HostProcess(
                role=str(own.role[-1]),  # a child may be identified as a worker only after its first samples
                pid=pid,
                maximum_rss_bytes=int(own.rss_bytes.max()),
                maximum_private_bytes=None if private == NONE else private,
            )
        )
    return tuple(sorted(processes, key=lambda one: (_place(one.role), -one.maximum_rss_bytes, one.pid)))


def _place(role: str) -> int:
    return ROLES.index(role) if role in ROLES else len(ROLES)


def _closest(limits: HostLimits) -> Iterator[HostLimit]:
    for name in dict.fromkeys(limits.name.tolist()):
        own = limits.take(limits.name == name)
        row = int(np.argmin(own.total_bytes - own.used_bytes))
        yield HostLimit(name, int(own.total_bytes[row]), int(own.used_bytes[row]))


def _describe_limit(limit: HostLimit) -> str:
    full = f"{format_bytes(limit.used_bytes)} of {format_bytes(limit.total_bytes)} in use"
    if limit.name == _SHM:
        return (
            f"/dev/shm was nearly full, {full}: the batches of loader workers lie there. Fewer workers, a smaller "
            "prefetch_factor, or a larger one (docker run --shm-size) help."
        )
    return f"The memory of the {limit.name} was nearly full, {full}: the kernel kills the largest process at its end."


def _grown(time_us: Floats, sizes: Ints) -> tuple[int, int, float, float] | None:
    """Returns the bytes and times between which a process keeps growing; None where it does not."""
    if len(sizes) < 2:
        return None
    settled = time_us >= time_us[0] + _SETTLED * (time_us[-1] - time_us[0])
    times, own = time_us[settled], sizes[settled]
    if len(own) < _LEAST_SAMPLES:
        return None
    quarter = max(1, len(own) // 4)
    first, last = int(np.median(own[:quarter])), int(np.median(own[-quarter:]))
    middle = int(np.median(own[len(own) // 2 - quarter // 2 : len(own) // 2 + quarter // 2 + 1]))
    grown = last - first
    if grown < max(_GROWTH_BYTES, _GROWTH * first) or last - middle < _GOES_ON * grown:
        return None
    if np.any(own[-quarter:] < middle):  # it comes and goes
        return None
    return first, last, float(times[: quarter].mean()), float(times[-quarter:].mean())


def _joined(alike: list[HostGrowth]) -> HostGrowth:
    one = alike[0]
    first, last = (
        sum(getattr(each, name) for each in alike) // len(alike) for name in ("first_bytes", "last_bytes")
    )
    return HostGrowth(one.role, len(alike), first, last, max(each.seconds for each in alike), one.cause)


def _cause(heap: HostHeap, from_us: float, to_us: float, grown: int) -> str:
    """Returns what has grown inside a trainer meanwhile, by the samples of its heaps; "" where they do not tell."""
    rows = np.flatnonzero((heap.time_us >= from_us) & (heap.time_us <= to_us) & (heap.used_bytes != NONE))
    if len(rows) < 2:
        return ""
    used, free, blocks = (
        int(column[rows[-1]] - column[rows[0]]) for column in (heap.used_bytes, heap.free_bytes, heap.python_blocks)
    )
    if free >= grown / 2:
        return (
            f"{format_bytes(free)} of it is freed memory that the C library keeps; "
            "MALLOC_ARENA_MAX=2 or MALLOC_TRIM_THRESHOLD_=131072 in the environment return it"
        )
    if blocks * _BLOCK_BYTES >= grown / 4:
        return f"{format_count(blocks, 'more object')} of Python"
    if used >= grown / 2:
        return "on the heap of the C library (tensors, numpy arrays, or C code)"
    return "outside the C library's heap (mapped by a library, or small objects of Python)"
