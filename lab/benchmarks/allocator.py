"""Models of allocators: the caching one beside recordings of real ones, static plans beside lower bounds."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lab.benchmarks.recording import SAMPLES
from lab.benchmarks.section import Bar, Section, least_middle_most
from memprof.analysis.allocator.static_report import StaticReport, build_static_report
from memprof.replay.allocator.events import ALLOCATE, FREE, Requests, replay
from memprof.replay.allocator.rules import MIB, Settings
from memprof.replay.static.intervals import Intervals
from memprof.replay.static.offsets import Placement, best_fit, greedy_by_size, search_offsets
from memprof.trace.schema import Floats, Ints
from memprof.trace.store import Trace
from tests.replay.allocator.recorded import Comparison, compare
from tests.replay.allocator.snapshots import cut_beginning, read_devices, snapshot_paths
from tests.replay.static.hard_cases import HARD_CASES, read_hard_case

EVENTS = 1_000_000
BAR_SECONDS, BAR_BYTES = 5.0, 100.0
_COUNTS = ("allocations", "segment events", "final blocks")
COLUMNS = ("Recording", "history", *_COUNTS, "ties", "differ", "cut: differ")
#: Mismatches that are printed of each recording.
_SHOWN = 10
#: Ways of planning, and how far above the lower bound the search may be for the samples and for hard cases.
_PLANS = ("largest first", "best fit", "search")
HARD_COLUMNS = ("Case", "buffers", *_PLANS, "known", "time")
STATIC_SHARE, HARD_SHARE = 0.001, 0.06
#: Seconds for each hard case, and the height into which each is known to fit.
LIMIT_S, QUICK_LIMIT_S, KNOWN = 60.0, 2.0, 1 << 20
#: Shares of the events that are cut off at the beginning.
_CUTS = (0.25, 0.5, 0.75)


def allocator_replay(folder: Path, *, quick: bool) -> Section:
    """Replays every real snapshot there is, and a million synthetic events."""
    rows, wrong, with_history = [], 0, 0
    for path in snapshot_paths():
        for device in read_devices(path):
            name = f"{path.name.split('__')[0]}, device {device.number}"
            if not len(device.events) or "alloc" not in device.events.action:
                rows.append((name, "none", "", "", "", "", "", ""))
                continue
            with_history += 1
            compared = compare(device.events, device.end, device.settings)
            later = [
                compare(cut_beginning(device.events, share), device.end, device.settings, compared.tie_break)
                for share in _CUTS
            ]
            apart = sum(len(one.mismatches) for one in later)
            wrong += len(compared.mismatches) + apart
            rows.append(_row(name, compared, apart))
            for mismatch in compared.mismatches[:_SHOWN]:
                print(f"{path.name}: event {mismatch.event}: {mismatch.what}")
    events = EVENTS // 20 if quick else EVENTS
    asked = busy_requests(events)
    crowded = crowded_requests(events)
    growing = Settings(expandable_segments=True)
    seconds = [_seconds(one, chosen) for one in (asked, crowded) for chosen in (Settings(), growing)]
    bytes_each = _bytes_each(busy_requests(events // 5))  # tracing memory takes long, and fewer events cost no less
    passed = not wrong and max(seconds) <= BAR_SECONDS and bytes_each <= BAR_BYTES
    return Section(
        title="The caching allocator's model",
        how=(
            "Public memory snapshots of CUDA jobs, replayed: every segment, address and final block must be as "
            "recorded. A history that begins in the middle is rebuilt backwards from its end; cut: with a quarter, a "
            f"half and three quarters of the events cut off. Of {len(rows)} recordings {with_history} have a history. "
            "Only tests worked out by hand cover max_split_size, roundup, garbage collection, a full device, released "
            f"segments, growing segments and private pools. {events:,} synthetic events: {seconds[0]:.1f} s "
            f"({seconds[1]:.1f} s with expandable_segments), with 60,000 small blocks alive {seconds[2]:.1f} s "
            f"({seconds[3]:.1f} s)."
        ),
        columns=COLUMNS,
        rows=rows,
        bar=Bar(
            f"nothing differs, {EVENTS:,} events within {BAR_SECONDS:.0f} s and {BAR_BYTES:.0f} bytes per event",
            f"{wrong} differ; {max(seconds):.1f} s, {bytes_each:.0f} bytes",
            passed=passed,
        ),
        brief=brief_of(rows),
    )


def brief_of(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns those with a history that have the fewest, the median and the most allocations, without their ties."""
    with_history = least_middle_most([row for row in rows if row[1] != "none"], 2)
    return (*COLUMNS[:5], *COLUMNS[6:]), [(*row[:5], *row[6:]) for row in with_history]


def busy_requests(events: int) -> Requests:
    """Makes requests of all sizes, half of them small, with some 300 alive at a time."""
    random = np.random.default_rng(0)
    count = events // 2
    is_small = random.random(count) < 0.5
    size = np.where(is_small, random.integers(1, MIB, count), random.integers(MIB, 64 * MIB, count))
    return _with_lives(size, random.exponential(300, count))


def crowded_requests(events: int) -> Requests:
    """Makes small requests with lives so long that tens of thousands of free blocks lie between those in use."""
    random = np.random.default_rng(0)
    count = events // 2
    return _with_lives(random.integers(1, MIB, count), random.exponential(0.12 * count, count))


def _with_lives(size: Ints, life: Floats) -> Requests:
    """Makes one request after the other, each freed after as many others as its life is long."""
    count = len(size)
    made = 2 * np.arange(count)
    freed = made + 2 * life.astype(np.int64) + 1
    order = np.argsort(np.concatenate([made, freed]), kind="stable")
    kind = np.repeat(np.array([ALLOCATE, FREE]), count)
    return Requests.of(kind[order], np.tile(np.arange(count), 2)[order], size)


def _row(name: str, compared: Comparison, apart: int) -> tuple[str, ...]:
    history = "whole" if compared.is_complete else "from the middle"
    counts = (f"{count:,}" for count in (compared.allocations, compared.segment_events, compared.blocks))
    return (name, history, *counts, " or ".join(compared.fitting), str(len(compared.mismatches)), str(apart))


def _seconds(asked: Requests, settings: Settings) -> float:
    start = time.process_time()
    replay(asked, settings)
    return time.process_time() - start


def _bytes_each(asked: Requests) -> float:
    columns = (asked.kind, asked.allocation, asked.size, asked.stream, asked.owner)
    tracemalloc.start()
    done = replay(asked)
    done.reserved()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return float((peak + sum(column.nbytes for column in columns)) / len(asked))


def static_planning(folder: Path, *, quick: bool) -> Section:
    """Plans the steady step of each sample recording."""
    rows, worst = [], 0.0
    for path in sorted(SAMPLES.glob("*/run.memprof")):
        step = Trace.open(path).steady_step()
        start = time.process_time()
        report = build_static_report(step)
        seconds = time.process_time() - start
        assert report.searched is not None
        worst = max(worst, report.searched / report.bound - 1)
        rows.append(_static_row(path.parent.name, report, seconds))
    return Section(
        title="Static planning",
        how=(
            "The steady step of each sample: the memory its storages need if all lifetimes are known ahead, above the "
            "lower bound (most bytes needed at once), and what the caching allocator would reserve."
        ),
        columns=("Step", "lower bound, MiB", *_PLANS, "given out", "reserved", "in place", "time"),
        rows=rows,
        bar=Bar(f"search within {STATIC_SHARE:.1%} of the bound", f"{worst:.2%}", passed=worst <= STATIC_SHARE),
    )


def _static_row(name: str, report: StaticReport, seconds: float) -> tuple[str, ...]:
    sizes = (report.greedy, report.best_fit, report.searched, report.allocated, report.reserved, report.in_place_greedy)
    above = [f"{100 * ((size or 0) / report.bound - 1):+.2f} %" for size in sizes]
    return (name, f"{report.bound / 1024**2:.2f}", *above, f"{1000 * seconds:.0f} ms")


def hard_placements(folder: Path, *, quick: bool) -> Section:
    """Searches for each of minimalloc's hard cases."""
    rows, worst = [], 0.0
    limit_s = QUICK_LIMIT_S if quick else LIMIT_S
    for path in HARD_CASES:
        lives = read_hard_case(path)
        bound = lives.lower_bound()
        largest, birth = greedy_by_size(lives), best_fit(lives)
        start = time.monotonic()
        placed = search_offsets(lives, min(largest, birth, key=lambda one: one.height), time_limit_s=limit_s)
        seconds = time.monotonic() - start
        _check_placement(lives, placed)
        worst = max(worst, placed.height / bound - 1)
        heights = (largest.height, birth.height, placed.height, KNOWN)
        above = [f"{100 * (height / bound - 1):+.2f} %" for height in heights]
        rows.append((path.stem, str(len(lives)), *above, f"{seconds:.1f} s"))
    return Section(
        title="Hard placements",
        how=(
            "The eleven hard cases of [minimalloc](https://github.com/google/minimalloc) (Moffitt 2023): height of the "
            f"placement above the lower bound, which may not be reachable, after {limit_s:.0f} s at most: least, "
            "median and largest of the search. known: the capacity given to minimalloc."
        ),
        columns=HARD_COLUMNS,
        rows=rows,
        bar=Bar(
            f"search within {HARD_SHARE:.0%} of the bound",
            f"{worst:.2%} at most, {sum(row[4] == '+0.00 %' for row in rows)} of {len(rows)} at the bound",
            passed=worst <= HARD_SHARE,
        ),
        brief=(HARD_COLUMNS, least_middle_most(rows, 4)),
    )


def _check_placement(lives: Intervals, placed: Placement) -> None:
    """Raises where two lives that meet overlap, or the height is not that of the highest."""
    ends = placed.offset + lives.size
    for row in range(len(lives) - 1):
        rest = slice(row + 1, None)
        meets = (lives.first[rest] <= lives.last[row]) & (lives.last[rest] >= lives.first[row])
        if np.any(meets & (placed.offset[rest] < ends[row]) & (ends[rest] > placed.offset[row])):
            raise AssertionError("two buffers overlap")
    if placed.height != ends.max():
        raise AssertionError("the height is not that of the highest buffer")
