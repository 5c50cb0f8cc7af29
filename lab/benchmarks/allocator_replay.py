"""Does the model of the caching allocator reproduce recordings of real ones, and how fast is it?"""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import numpy as np

from lab.benchmarks.section import Section, verdict
from memprof.replay.allocator.events import ALLOCATE, FREE, Requests, replay
from memprof.replay.allocator.recorded import Comparison, compare
from memprof.replay.allocator.rules import MIB, Settings
from memprof.trace.schema import Floats, Ints
from tests.replay.allocator.snapshots import cut_beginning, read_devices, snapshot_paths

EVENTS = 1_000_000
BAR_SECONDS = 5.0
BAR_BYTES = 100.0
#: Mismatches that are printed of each recording.
_SHOWN = 10
#: Shares of the events that are cut off at the beginning.
_CUTS = (0.25, 0.5, 0.75)


def measure(folder: Path, *, quick: bool) -> Section:
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
            "Recorded events of real CUDA jobs (memory snapshots from public repositories), replayed: each segment "
            "with its size, each allocation with its address, and the final blocks, which must all be as "
            "recorded. Where the history begins in the middle, the state before it is rebuilt backwards from the end; "
            "the last column is of each recording with a quarter, a half and three quarters of its events cut off. "
            f"Of {len(rows)} recordings {with_history} have a history; the others contain nothing to replay. "
            "Ties: the order of equally large free blocks that fits the events; where several do, it is undetermined. "
            "Not shown by any recording here, and only covered by tests worked out by hand: max_split_size, roundup, "
            "garbage "
            "collection, a full device, released segments, growth of expandable segments, private pools in use. "
            f"Speed on one core, of {events:,} synthetic events: blocks of up to 64 MiB, some 300 alive, "
            f"{seconds[0]:.1f} s ({seconds[1]:.1f} s with expandable_segments); small blocks, some 60,000 alive and "
            f"some 26,000 free between them, {seconds[2]:.1f} s ({seconds[3]:.1f} s). "
            f"{bytes_each:.0f} bytes of memory an event, the columns themselves included."
        ),
        columns=(
            "Recording",
            "history",
            "allocations",
            "segment events",
            "final blocks",
            "ties",
            "differ",
            "cut: differ",
        ),
        rows=tuple(rows),
        bar=verdict(
            f"nothing differs, {EVENTS:,} events within {BAR_SECONDS:.0f} s and {BAR_BYTES:.0f} bytes per event",
            passed=passed,
        ),
    )


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
    return (
        name,
        history,
        f"{compared.allocations:,}",
        f"{compared.segment_events:,}",
        f"{compared.blocks:,}",
        " or ".join(compared.fitting),
        str(len(compared.mismatches)),
        str(apart),
    )


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
