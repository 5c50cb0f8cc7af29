"""Splits of layers over pipeline stages: by time, and so that the fullest stage holds least."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from memprof.planners.arrangement.arrangement import Arrangement
from memprof.planners.arrangement.layer_costs import LayerCosts, ScaledCosts
from memprof.planners.arrangement.pipeline import stage_peak
from memprof.trace.schema import Floats


def split_by_count(units: int, chunks: int) -> tuple[int, ...]:
    """Returns equal numbers of layers for each chunk, the first of them one more where they do not divide.

    Args:
        units: Layers, and one unit before and after them, which the first and last chunk have as well.
        chunks: Number of chunks.
    """
    layers = units - 2
    sizes = [layers // chunks + (row < layers % chunks) for row in range(chunks)]
    sizes[0] += 1
    sizes[-1] += 1
    return tuple(sizes)


def split_by_time(times_us: Floats, chunks: int) -> tuple[int, ...]:
    """Returns the split whose slowest chunk takes least time, every chunk with a layer.

    Args:
        times_us: Time of each unit, the first and last of which are not layers.
        chunks: Number of chunks.
    """
    total = np.append(0.0, np.cumsum(times_us))
    units = len(times_us)

    def reach(limit: float) -> list[int] | None:
        return _fill(units, chunks, lambda _, first: int(np.searchsorted(total, total[first] + limit, "right")) - 1)

    return _least(reach, 0.0, float(total[-1]), units, chunks)


def split_by_peak(costs: LayerCosts, scaled: ScaledCosts, arrangement: Arrangement) -> tuple[int, ...]:
    """Returns the split whose fullest stage has the lowest peak, of schedules with one chunk on each rank.

    The first stages of 1F1B hold most micro-batches and so get fewer layers. The peak of a stage grows with its layers,
    so that a limit can be met by some split if it is met by filling the stages in order up to it.

    Args:
        costs: The recorded costs.
        scaled: The same, on a rank of the arrangement.
        arrangement: The arrangement, whose split is ignored.
    """
    units, stages = len(costs.names), arrangement.pipeline
    known: dict[tuple[int, int, int], int] = {}

    def peak(row: int, first: int, end: int) -> int:
        key = row, first, end
        if key not in known:
            known[key] = stage_peak(costs, scaled, arrangement, row, ((first, end),)).peak_bytes
        return known[key]

    def reach(limit: float) -> list[int] | None:
        def end_of(row: int, first: int) -> int:
            low, high = first, units
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if peak(row, first, middle) <= limit else (low, middle - 1)
            return low

        return _fill(units, stages, end_of)

    ends = np.cumsum(split_by_count(units, stages)).tolist()
    most = max(peak(row, first, end) for row, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)))
    return _least(reach, 0.0, float(most), units, stages)


def _fill(units: int, chunks: int, end_of: Callable[[int, int], int]) -> list[int] | None:
    """Fills chunks in order, each as far as it fits; returns their sizes, None where units are left over.

    Args:
        units: Number of units.
        chunks: Number of chunks, each with a layer at least.
        end_of: Returns the unit after the last that fits, of a chunk and its first unit.
    """
    sizes, first = [], 0
    for row in range(chunks):
        # The first chunk has the unit before the layers and one layer at least, the last one layer and the unit after.
        least = units if row == chunks - 1 else first + (2 if row == 0 else 1)
        most = units if row == chunks - 1 else units - 1 - (chunks - 1 - row)
        end = min(end_of(row, first), most)
        if end < least:
            return None
        sizes.append(end - first)
        first = end
    return sizes


def _least(
    reach: Callable[[float], list[int] | None], low: float, high: float, units: int, chunks: int
) -> tuple[int, ...]:
    """Returns the split of the lowest limit that can be met, found by bisection to a thousandth."""
    best = reach(high)
    while high - low > high / 1000:
        middle = (low + high) / 2
        found = reach(middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return split_by_count(units, chunks) if best is None else tuple(best)
