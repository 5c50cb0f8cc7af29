"""Each process of a job: its maxima, whether it keeps growing, and what grows inside a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from memprof.analysis.leaks.leak import Leak, describe_cause, describe_holder, describe_rate
from memprof.trace.files.spool import OBJECTS
from memprof.trace.schema import NONE, Floats, HostHeap, HostMemory, Ints
from memprof.units import format_bytes, format_count

#: The display order of roles; any other comes last.
ROLES = ("trainer", "worker", "child")
#: The column of what is a process's own, and those of the rest. The kernel can drop most pages of mapped files.
OWN, FILES = "anonymous_bytes", "mapped files"
OTHERS = {"shared memory": "shared_bytes", "swapped out": "swapped_bytes", FILES: "file_bytes"}
#: Growth is looked for after this share of a process's life, in at least this many samples, and told from these bytes
#: and this share of what there was.
_SETTLED, LEAST_SAMPLES, _GROWTH_BYTES, _GROWTH = 1 / 3, 6, 8 * 2**20, 0.05
#: Share of the growth that the second half of the samples must have: what fills once does not go on.
_GOES_ON = 0.3
#: What returns memory that was freed.
RETURNS = "MALLOC_ARENA_MAX=2 and MALLOC_TRIM_THRESHOLD_=131072 in the environment"
#: The fullest moment stands out from this multiple of the usual bytes on, and these bytes above it.
_SPIKE, _SPIKE_BYTES = 1.25, 64 * 2**20
#: A moment is short if at most this share of the samples are this near to it.
_SHORT, _NEAR = 0.2, 0.9
#: Bytes that a small object of Python takes at the least.
_BLOCK_BYTES = 64
#: A variable is named if what it holds is at least one part in so many of the growth.
_PART = 4
_OF_C = "C code or a library: tensors and numpy arrays hardly grew"


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
        who, each = (f"the {self.role}", "") if self.processes == 1 else (count_of(self.role, self.processes), ", each")
        grown = self.last_bytes - self.first_bytes
        rate = f"{format_bytes(round(grown / max(self.seconds, 1e-9)))} a second"
        span = f"from {format_bytes(self.first_bytes)} to {format_bytes(self.last_bytes)}, {rate}"
        return f"Host memory of {who} grows{each} {span}{self.cause and f': {self.cause}'}."


def summarise_processes(samples: HostMemory) -> tuple[HostProcess, ...]:
    """Returns each process's maxima over the whole job: the trainer first, then the workers, largest first."""
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
    return tuple(sorted(processes, key=lambda one: (place_of(one.role), -one.maximum_rss_bytes, one.pid)))


def count_of(role: str, number: int) -> str:
    """Returns a number of processes of a role: ``2 workers``."""
    return format_count(number, role, "children" if role == "child" else "")


def place_of(role: str) -> int:
    """Returns the place of a role in the display order."""
    return ROLES.index(role) if role in ROLES else len(ROLES)


def divide_samples(samples: HostMemory) -> dict[str, Ints]:
    """Returns the bytes of each kind of each sample, which are by time; by the names of the columns. Shapes (samples,).

    Between two divisions into kinds, only memory of no file changes, and a trainer's peak between two samples is of it;
    where the system does not tell it, all resident bytes are.
    """
    kinds = {name: np.zeros(len(samples), dtype=np.int64) for name in (OWN, *OTHERS.values())}
    for pid in np.unique(samples.pid).tolist():
        rows = np.flatnonzero(samples.pid == pid)
        one = samples.take(rows)
        known = np.flatnonzero(one.anonymous_bytes != NONE)
        if not len(known):
            continue
        last = known[np.maximum(np.searchsorted(known, np.arange(len(rows)), side="right") - 1, 0)]
        for name, sizes in kinds.items():
            sizes[rows] = np.maximum(getattr(one, name)[last], 0) * (one.rss_bytes > 0)  # none once it has ended
        own = np.where(one.heap_bytes == NONE, one.rss_bytes, one.heap_bytes)
        changed = own - own[last]
        if one.role[-1] == ROLES[0]:
            changed += beyond_samples(one)
        kinds[OWN][rows] = np.maximum(kinds[OWN][rows] + changed, 0)
    return kinds


def evenly(own: HostMemory) -> HostMemory:
    """Returns as many samples of one process, evenly spaced: a process is written more often while it changes."""
    times = np.linspace(own.time_us[0], own.time_us[-1], len(own))
    rows = np.searchsorted(own.time_us, times, side="right") - 1
    return own.take(np.maximum(rows, 0)).replace(time_us=times)


def beyond_samples(own: HostMemory) -> Ints:
    """Returns the bytes of no file that a process had beyond each sample's, since the one before. Shape (samples,)."""
    most = np.maximum(own.peak_rss_bytes, own.rss_bytes)
    before = np.maximum.accumulate(np.append(most[:1], most[:-1]))
    files = np.where(own.heap_bytes == NONE, 0, own.rss_bytes - own.heap_bytes)
    dropped = np.maximum.accumulate(files) - files  # a peak may be of these
    return np.where(most > before, np.maximum(most - own.rss_bytes - dropped, 0), 0)


def describe_spike(samples: HostMemory, from_us: float, to_us: float) -> str:
    """Returns that a trainer's highest moment was short and far above its usual ones, "" where none was.

    Args:
        samples: Samples of all processes, in order.
        from_us: Moments from here on are looked at.
        to_us: The last such moment.
    """
    for pid in np.unique(samples.pid[samples.role == ROLES[0]]).tolist():
        own = samples.take((samples.pid == pid) & (samples.heap_bytes != NONE))
        sizes = own.heap_bytes + beyond_samples(own)
        own = own.replace(heap_bytes=sizes).take((own.time_us > from_us) & (own.time_us <= to_us))
        # The kernel's first mark may have been made before.
        own = own.take(np.arange(len(own)) > np.argmax(np.append(own.peak_rss_bytes != NONE, True)))
        if len(own) < LEAST_SAMPLES:
            continue
        even, most = evenly(own).heap_bytes, int(own.heap_bytes.max())
        usual = int(np.median(even))
        if most < max(_SPIKE * usual, usual + _SPIKE_BYTES) or np.mean(even > _NEAR * most) > _SHORT:
            continue
        if _grown(own.time_us, own.heap_bytes) is not None:  # it does not come down
            continue
        after = (own.time_us[np.argmax(own.heap_bytes)] - samples.time_us[0]) / 1e6
        return (
            f"Host memory of the trainer rose to {format_bytes(most)} for a moment, {after:.0f} s after the start, "
            f"from {format_bytes(usual)} usually: something was held twice, as when a checkpoint is saved or loaded."
        )
    return ""


def find_growth(
    samples: HostMemory, heaps: Mapping[int, HostHeap], kept: Mapping[int, Sequence[Leak]]
) -> tuple[HostGrowth, ...]:
    """Returns the processes that keep growing, those of one role together.

    Args:
        samples: Samples of all processes, in order, from when growth counts.
        heaps: The heaps of the trainers, by process id.
        kept: What becomes more in each trainer's Python, most bytes first.
    """
    by_role: dict[str, list[HostGrowth]] = {}
    samples = samples.take(samples.heap_bytes != NONE)
    for pid in np.unique(samples.pid).tolist():
        own = evenly(samples.take(samples.pid == pid))
        found = _grown(own.time_us, own.heap_bytes)
        if found is None:
            continue
        first, last, from_us, to_us = found
        heap = heaps.get(pid, HostHeap.empty())
        cause = _cause(heap, kept.get(pid, ()), from_us, to_us, last - first)
        role = str(own.role[-1])
        by_role.setdefault(role, []).append(HostGrowth(role, 1, first, last, (to_us - from_us) / 1e6, cause))
    return tuple(_joined(alike) for alike in by_role.values())


def _grown(time_us: Floats, sizes: Ints) -> tuple[int, int, float, float] | None:
    """Returns the bytes and times between which a process keeps growing; None where it does not."""
    if len(sizes) < 2:
        return None
    settled = time_us >= time_us[0] + _SETTLED * (time_us[-1] - time_us[0])
    times, own = time_us[settled], sizes[settled]
    if len(own) < LEAST_SAMPLES:
        return None
    quarter = max(1, len(own) // 4)
    first, last = int(np.median(own[:quarter])), int(np.median(own[-quarter:]))
    middle = int(np.median(own[len(own) // 2 - quarter // 2 : len(own) // 2 + quarter // 2 + 1]))
    grown = last - first
    if grown < max(_GROWTH_BYTES, _GROWTH * first) or last - middle < _GOES_ON * grown:
        return None
    if np.any(own[-quarter:] < middle):  # it comes and goes
        return None
    return first, last, float(times[:quarter].mean()), float(times[-quarter:].mean())


def _joined(alike: list[HostGrowth]) -> HostGrowth:
    one = alike[0]
    first, last = (sum(getattr(each, name) for each in alike) // len(alike) for name in ("first_bytes", "last_bytes"))
    return HostGrowth(one.role, len(alike), first, last, max(each.seconds for each in alike), one.cause)


def _cause(heap: HostHeap, kept: Sequence[Leak], from_us: float, to_us: float, grown: int) -> str:
    """Returns what has grown inside a trainer meanwhile, by the samples of its heaps; "" where they do not tell."""
    rows = np.flatnonzero((heap.time_us >= from_us) & (heap.time_us <= to_us) & (heap.used_bytes != NONE))
    if len(rows) < 2:
        return ""
    used, free, blocks = (
        int(column[rows[-1]] - column[rows[0]]) for column in (heap.used_bytes, heap.free_bytes, heap.python_blocks)
    )
    if free >= grown / 2:
        return f"{format_bytes(free)} of it is freed memory that the C library keeps; {RETURNS} return it"
    if blocks * _BLOCK_BYTES >= grown / 4:
        return f"{format_count(blocks, 'more Python object')}{_named(kept, grown, is_objects=True)}"
    if used >= grown / 2:
        held = _held(heap, from_us, to_us)
        named = "" if held == _OF_C else _named(kept, grown, is_objects=False)
        return f"on the heap of the C library ({held}){named}"
    return "outside the C library's heap (mapped by a library, or small objects of Python)"


def _named(kept: Sequence[Leak], grown: int, *, is_objects: bool) -> str:
    """Returns the largest of what Python holds more and more of, and through which variable; "" for a small part."""
    alike = [one for one in kept if (one.dtype == OBJECTS) == is_objects and one.held_by is not None]
    named = next((one for one in alike if _PART * one.kept_bytes >= grown), None)
    if named is not None:
        return f", {describe_rate(replace(named, every_steps=0))} of {describe_cause(named)}"
    early = next((one.held_by for one in alike if is_objects and one.held_by is not None), None)
    return "" if early is None else f", such as those of {describe_holder(early)}"


def _held(heap: HostHeap, from_us: float, to_us: float) -> str:
    """Returns what the used bytes of a heap are that have grown, by the bytes that Python's tensors and arrays have."""
    counted = heap.take((heap.held_bytes != NONE) & (heap.used_bytes != NONE) & (heap.time_us <= to_us))
    counted = counted.take(np.s_[max(0, np.searchsorted(counted.time_us, from_us, side="right") - 1) :])
    if len(counted) > 1:  # the first of them may have been before
        held, used = (int(column[-1] - column[0]) for column in (counted.held_bytes, counted.used_bytes))
        if 2 * held >= used > 0:
            return "tensors or numpy arrays that Python holds"
        if used > 0 and 4 * held <= used:
            return _OF_C
    return "tensors, numpy arrays, or C code"
