"""Segments of a device's allocator, made by hand: what is free in them, and the largest hole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("plotly")

import numpy as np
from plotly.utils import PlotlyJSONEncoder

from memprof.trace.manifest import Machine, Manifest
from memprof.trace.schema import NONE, AllocatorEvents, Segments
from memprof.trace.store import Trace
from memprof_dashboard.figures.bars import segments
from memprof_dashboard.pages.segments import _page, address_map, verdict
from memprof_dashboard.palette import THEMES
from memprof_dashboard.sources import Rank
from memprof_dashboard.views.fragments import AllocatorHistory, Fragments
from tests.building import Op, Storage, make_tables

#: A unit so large that what is scattered matters.
UNIT = 32 << 20
LIGHT = THEMES["light"]
BASE = 0x7F00_0000_0000

#: Two segments of 10 KiB: the first holds blocks at 1 to 3 and 6 to 8 KiB and one that awaits at 8 to 9, so its holes
#: are of 1, 3 and 1 KiB; the second is used up.
EVENTS = (
    ("alloc", BASE, 1),
    ("alloc", BASE + 1 * UNIT, 2),
    ("alloc", BASE + 3 * UNIT, 3),
    ("alloc", BASE + 6 * UNIT, 2),
    ("alloc", BASE + 8 * UNIT, 1),
    ("free_requested", BASE, 1),
    ("free_completed", BASE, 1),
    ("free_requested", BASE + 3 * UNIT, 3),
    ("free_completed", BASE + 3 * UNIT, 3),
    ("free_requested", BASE + 8 * UNIT, 1),
    ("alloc", BASE + 100 * UNIT, 10),
)


def _trace(*, active: int = 5, request: int = 0, spare: int = 0, kind: str = "cuda", device: str = "cuda:0") -> Trace:
    """Builds a recording of the two segments, and of ``spare`` KiB in a third that is all free."""
    sizes = [10, 10, *([spare] if spare else [])]
    tables = make_tables([[Op(makes=["a"])]], [Storage("a", 10)])
    events = [*EVENTS, *([("oom", 0, request)] if request else [])]
    count = len(sizes)
    tables[Segments] = Segments.of(
        device=[device] * count,
        address=[BASE + 100 * number * UNIT for number in range(count)],
        total_size_bytes=[size * UNIT for size in sizes],
        allocated_size_bytes=[4 * UNIT, 10 * UNIT, 0][:count],
        active_size_bytes=[active * UNIT, 10 * UNIT, 0][:count],
        requested_size_bytes=[4 * UNIT, 10 * UNIT, 0][:count],
        segment_type=["small", "large", "large"][:count],
    ).take(np.arange(count)[::-1])
    tables[AllocatorEvents] = AllocatorEvents.of(
        index=range(len(events)),
        device=[device] * len(events),
        action=[action for action, _, _ in events],
        address=[address for _, address, _ in events],
        size_bytes=[size * UNIT for _, _, size in events],
        op_id=[0] * len(events),
    )
    manifest = Manifest(target="train.py", machine=Machine(device_kind=kind))
    return Trace.of([(manifest, tables)], Path("made-by-hand.memprof"))


def _fragments(**wanted: int) -> Fragments:
    return AllocatorHistory(_trace(**wanted)).at()


def _opened(trace: Trace) -> str:
    """Returns the page at the first operator, as JSON."""
    return _text(_page(Rank(trace), AllocatorHistory(trace), 0, LIGHT))


def _text(component: object) -> str:
    return json.dumps(component, cls=PlotlyJSONEncoder, ensure_ascii=False)


def test_largest_hole_lies_between_blocks() -> None:
    """What is allocated, awaits another stream and is free is the snapshot's; the largest hole is between blocks."""
    fragments = _fragments()
    assert fragments.allocated.tolist() == [4 * UNIT, 10 * UNIT]
    assert fragments.awaiting.tolist() == [1 * UNIT, 0]
    assert fragments.free.tolist() == [5 * UNIT, 0]
    assert fragments.hole.tolist() == [3 * UNIT, 0]
    assert (fragments.largest_hole, fragments.most_hole, fragments.is_told) == (3 * UNIT, 3 * UNIT, True)


def test_hole_is_not_guessed() -> None:
    """Where the events do not account for all that is in use, the hole is unknown, and free memory bounds it."""
    fragments = _fragments(active=6)
    assert fragments.hole.tolist() == [NONE, 0]
    assert (fragments.most_hole, fragments.is_told) == (4 * UNIT, False)
    assert "the largest hole is at most 128.00 MiB" in verdict(fragments)


def test_a_larger_free_segment_settles_it() -> None:
    """An unknown hole does not matter where a free segment is larger than it can be."""
    fragments = _fragments(active=6, spare=50)
    assert (fragments.largest_hole, fragments.is_told) == (50 * UNIT, True)
    assert fragments.idle_bytes == 50 * UNIT
    assert "Fragmentation is not the problem" in verdict(fragments)


@pytest.mark.parametrize(
    ("request_units", "said"),
    [
        (0, "This is fragmentation: no request above 96.00 MiB fits between blocks"),
        (4, "This is fragmentation; expandable"),
        (6, "out of memory, not fragmented"),
    ],
)
def test_verdict_compares_with_the_request(request_units: int, said: str) -> None:
    """A request that fits into what is free but into no hole is fragmentation; a larger one is not."""
    text = verdict(_fragments(request=request_units))
    assert "160.00 MiB is reserved but free: 0 B in idle segments, 160.00 MiB scattered over segments in use" in text
    assert "the largest hole is 96.00 MiB" in text
    assert said in text


def test_little_that_is_scattered_is_no_fragmentation() -> None:
    """What no single request could use is below the threshold of memory that matters: 64 MiB, and 2 % of reserved."""
    fragments = _fragments()
    smaller = replace(fragments, free=fragments.free - np.array([1, 0]), hole=fragments.hole)
    assert fragments.is_fragmented
    assert not smaller.is_fragmented
    assert "too little is scattered to matter" in verdict(smaller)


def test_segments_are_those_at_the_cursor() -> None:
    """Events behind the cursor's operator are undone: blocks and segments that it had are there, later ones are not."""
    steps = [[Op(makes=["a"]), Op(), Op(frees=["a"])]]
    tables = make_tables(steps, [Storage("a", 10)])
    events = [
        (0, "segment_alloc", BASE, 10),
        (0, "alloc", BASE, 4),
        (1, "segment_alloc", BASE + 100 * UNIT, 20),
        (1, "alloc", BASE + 4 * UNIT, 2),
        (2, "free_requested", BASE, 4),
        (2, "segment_free", BASE + 100 * UNIT, 20),
    ]
    tables[AllocatorEvents] = AllocatorEvents.of(
        index=range(len(events)),
        device=["cuda:0"] * len(events),
        action=[action for _, action, _, _ in events],
        address=[address for _, _, address, _ in events],
        size_bytes=[size * UNIT for _, _, _, size in events],
        op_id=[op_id for op_id, _, _, _ in events],
    )
    tables[Segments] = Segments.of(
        device=["cuda:0"],
        address=[BASE],
        total_size_bytes=[10 * UNIT],
        allocated_size_bytes=[2 * UNIT],
        active_size_bytes=[2 * UNIT],
        requested_size_bytes=[2 * UNIT],
        segment_type=["large"],
    )
    manifest = Manifest(target="train.py", machine=Machine(device_kind="cuda"))
    history = AllocatorHistory(Trace.of([(manifest, tables)], Path("made-by-hand.memprof")))
    assert history.follows_cursor
    first, second, last = (history.at(op_id) for op_id in range(3))
    assert (first.allocated.tolist(), first.hole.tolist()) == ([4 * UNIT], [6 * UNIT])
    assert (second.allocated.tolist(), second.hole.tolist()) == ([6 * UNIT, 0], [4 * UNIT, 20 * UNIT])
    assert last.allocated.tolist() == [6 * UNIT, 0]  # what an operator frees is alive while it runs
    assert (history.at().allocated.tolist(), history.at().hole.tolist()) == ([2 * UNIT], [4 * UNIT])


def test_nothing_free_is_no_fragmentation() -> None:
    """Where all that is reserved is in use, nothing is lost."""
    fragments = _fragments()
    assert "no fragmentation" in verdict(replace(fragments, free=np.zeros(2, dtype=np.int64)))


def test_bars_stack_to_the_size() -> None:
    """The three bars of each segment sum to its size, and the mark stands at its largest hole."""
    fragments = _fragments()
    figure = segments(fragments, np.arange(2), LIGHT)
    *bars, mark = figure.data
    assert np.sum([np.asarray(bar.y) for bar in bars], axis=0).tolist() == [320, 320]
    assert (np.asarray(mark.x).tolist(), np.asarray(mark.y).tolist()) == ([0], [96])


def test_blocks_of_expandable_segments_lie_at_their_addresses() -> None:
    """Blocks that touch are one bar, also none of another state; between and behind them are the holes."""
    found = _fragments()
    figure = address_map(found, np.array([0, 1]), LIGHT)
    bars = {
        bar.name: [*zip(np.asarray(bar.y).tolist(), bar.base.tolist(), np.asarray(bar.x).tolist(), strict=True)]
        for bar in figure.data
    }
    scale = UNIT / 2**20
    assert figure.layout.xaxis.title.text == "offset in the segment, MiB"
    assert {name: [(row, at / scale, size / scale) for row, at, size in rows] for name, rows in bars.items()} == {
        "allocated": [(0, 1, 2), (0, 6, 2), (1, 0, 10)],
        "pending free (in use by another stream)": [(0, 8, 1)],
        "free (reserved)": [(0, 0, 1), (0, 3, 3), (0, 9, 1)],
    }
    assert "free, or allocated before recording" in [
        bar.name for bar in address_map(_fragments(active=6), np.array([0]), LIGHT).data
    ]


def test_page_tells_totals() -> None:
    """The page shows what is reserved, allocated, pending and free, and the bars as a table too."""
    text = _opened(_trace())
    for told in ("640.00 MiB", "448.00 MiB", "32.00 MiB", "160.00 MiB", "96.00 MiB", "view as table", hex(BASE)):
        assert told in text


def test_device_names_are_no_markup() -> None:
    """Texts of a recording cannot bring markup into the figure."""
    trace = _trace(device="<img src=x>")
    fragments = AllocatorHistory(trace).at()
    kinds = np.array(["<img src=x>"] * 2, dtype=object)
    figure = segments(replace(fragments, segments=fragments.segments.replace(segment_type=kinds)), np.arange(2), LIGHT)
    assert all("<img" not in text for bar in figure.data[:3] for text in bar.text)


@pytest.mark.parametrize(("kind", "said"), [("cpu", "No segments on CPU"), ("cuda", "No segments recorded")])
def test_without_segments_the_page_says_why(kind: str, said: str) -> None:
    """A recording without segments says why, and what to look at instead."""
    tables = make_tables([[Op(makes=["a"])]], [Storage("a", 10)])
    manifest = Manifest(target="train.py", machine=Machine(device_kind=kind))
    text = _opened(Trace.of([(manifest, tables)], Path("made-by-hand.memprof")))
    assert said in text
    assert "Lifetimes" in text
