"""Cuts forward into about as many segments as each is long, and recomputes the inside of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from memprof.planners.base import Planner, ScheduleRequest, ScheduleResult
from memprof.planners.graph.choices import Choices
from memprof.planners.graph.graph import Graph
from memprof.planners.graph.schedule import replay
from memprof.planners.graph.segments import Cuts, Segment, SegmentSchedules, cut_evenly, cut_points, narrow_cuts
from memprof.units import format_bytes

#: Maximum schedule length, as a multiple of the step's operators; cuts that do not separate a graph exceed it.
_MOST_REPEATS = 40
#: Shares of forward that the scan cuts: all of it, or less where the budget is not small.
_SHARES = (1.0, 0.75, 0.5, 0.25)
#: With fewer cut points than this, narrow cuts are tried as well.
_FEW_CUTS = 3


class Sqrt(Planner):
    """Keeps the values between segments: √N of them, those of the budgeted scan, or nested segments.

    All three forms are tried over the chain of values that every path passes through; where a graph has other narrow
    cuts, over those as well. The best by replay is returned.
    """

    name: ClassVar[str] = "sqrt"
    source: ClassVar[str] = (
        "Chen, Xu, Zhang, Guestrin 2016, Training Deep Nets with Sublinear Memory Cost: section 4.2 (√N segments) "
        "and algorithm 3 (budgeted scan), section 4.3 (recursion)"
    )
    summary: ClassVar[str] = "cuts forward into √N segments, keeps what crosses between them and recomputes the rest"

    def search(self, task: ScheduleRequest) -> ScheduleResult:
        """Tries every form and returns the fastest that fits."""
        choices = Choices(task)
        if choices.is_met:
            return choices.met()
        schedules = SegmentSchedules(task.graph)
        tried: set[tuple[Segment, ...]] = set()
        for cuts, where in cut_families(task.graph):
            count = sum(len(part.after_op) for part in cuts)
            for segments, how in every_form(cuts):
                if choices.is_late():
                    return choices.found()
                key = tuple(segments)
                if key in tried:
                    continue
                tried.add(key)
                runs = schedules.schedule(segments, most_runs=_MOST_REPEATS * task.graph.ops)
                if runs is not None:
                    choices.add(replay(task.graph, runs), f"{how}, of {count} {where}")
        return choices.found()


def cut_families(graph: Graph) -> Iterator[tuple[list[Cuts], str]]:
    """Yields the sets of cut points of a graph, with a description."""
    points, narrow = cut_points(graph), narrow_cuts(graph)
    of_points, of_narrow = (sum(len(part.after_op) for part in cuts) for cuts in (points, narrow))
    if of_points:
        yield points, "values that every path crosses"
    if of_narrow > of_points or (of_narrow and of_points < _FEW_CUTS):
        yield narrow, "narrow cuts"


def every_form(rounds: Sequence[Cuts]) -> Iterator[tuple[list[Segment], str]]:
    """Yields the segments of every form, whatever the budget, with a clause that describes them.

    Args:
        rounds: Where each round of forward can be cut.
    """
    longest = max((len(cuts.made_bytes) for cuts in rounds), default=0)
    for parts in _around_root(longest):
        segments = [segment for cuts in rounds for segment in cut_evenly(cuts, parts, levels=1)]
        yield segments, f"cuts forward into {parts} segments (the √N form)"
    for most_bytes in _scan_sizes(rounds):
        for share in _SHARES:
            segments = [segment for cuts in rounds for segment in scan(cuts, most_bytes, share)]
            how = f"cuts forward every {format_bytes(most_bytes)}"
            part = f", in its first {share:.0%}" if share < 1 else ""
            yield segments, f"{how}{part} (the budgeted scan, {len(segments)} segments)"
    for parts in (2, 3, 4):
        deepest = max(1, math.ceil(math.log(max(longest, 2), parts)))
        for levels in sorted({*range(2, min(deepest, 6) + 1), deepest + 1}):
            segments = [segment for cuts in rounds for segment in cut_evenly(cuts, parts, levels)]
            yield segments, f"keeps {parts - 1} cuts on each of up to {levels} levels (the recursive form)"


def scan(cuts: Cuts, most_bytes: float, share: float = 1.0) -> list[Segment]:
    """Cuts wherever the bytes made since the last cut first exceed a limit.

    Source: Chen et al. 2016, algorithm 3. The sum covers what forward saves for backward. Unlike in the paper, the last
    segment is not recomputed, so cutting a part of forward alone keeps the rest whole.

    Args:
        cuts: Where a round of forward can be cut.
        most_bytes: The paper's b.
        share: The share of cuts to make, the first ones.
    """
    chosen, since_cut = [], 0
    for place, made in enumerate(cuts.made_bytes[:-1].tolist()):
        since_cut += made
        if since_cut > most_bytes:
            chosen.append(place)
            since_cut = 0
    after = cuts.after_op[chosen[: math.ceil(len(chosen) * share)]].tolist()
    starts = [cuts.start_op, *(op_id + 1 for op_id in after)]
    return [Segment(start, tuple(after[:place]), place == len(after)) for place, start in enumerate(starts)]


def _around_root(intervals: int) -> list[int]:
    """Returns segment counts around the root of the number of intervals, and beyond."""
    root = math.sqrt(intervals)
    counts = {2, *(round(root * 2 ** (power / 4)) for power in range(-8, 9)), math.floor(root), math.ceil(root)}
    return sorted(count for count in counts if 2 <= count <= intervals)


def _scan_sizes(rounds: Sequence[Cuts]) -> list[float]:
    """Returns the values of b to try.

    The paper searches between √(xy/2) and √(2xy), where x are the bytes kept with b = 0 and y those of the largest
    segment then; others are tried more coarsely, from zero to half of all.
    """
    kept = max((float(cuts.passed_bytes.sum()) for cuts in rounds), default=0.0)
    largest = max((float(cuts.made_bytes.max()) for cuts in rounds), default=0.0)
    total = max((float(cuts.made_bytes.sum()) for cuts in rounds), default=0.0)
    if not kept or not largest:
        return [0.0]
    middle = math.sqrt(kept * largest)
    near = np.geomspace(middle / math.sqrt(2), middle * math.sqrt(2), 9)
    far = np.geomspace(largest / 4, max(total / 2, largest), 17)
    return sorted({0.0, *near.tolist(), *far.tolist()})
