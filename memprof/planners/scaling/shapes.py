"""Shapes at a size: each dimension grows linearly; they give the bytes of storages they fill exactly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from memprof.planners.scaling.curves import along
from memprof.trace.schema import Bools, Floats


def grown_shapes(
    texts: Sequence[np.ndarray], recorded: Floats, sizes: Sequence[int], size: int
) -> tuple[np.ndarray, Floats, Bools]:
    """Extrapolates the dimensions of each shape linearly.

    Args:
        texts: The shape of each storage in each step, such as ``4x16``; steps in ascending size, several may be equal.
        recorded: Its bytes there, shape ``(steps, storages)``.
        sizes: The size of each step.
        size: The size to evaluate.

    Returns:
        The shapes at the size, their bytes, and which of them match their storage's bytes in every step.
    """
    width = recorded.shape[1]
    shapes, exact = np.full(width, "", dtype=np.object_), np.zeros(width)
    is_known = np.zeros(width, dtype=np.bool_)
    known: dict[tuple[str, ...], tuple[tuple[int, ...], list[float]] | None] = {}
    for column, key in enumerate(zip(*(each.tolist() for each in texts), strict=True)):
        if key not in known:
            known[key] = _grown([_dimensions(text) for text in key], sizes, size)
        grown = known[key]
        if grown is None:
            continue
        dimensions, counts = grown
        item = recorded[0, column] / counts[0]
        if item >= 1 and all(recorded[step, column] == count * item for step, count in enumerate(counts)):
            shapes[column] = "x".join(map(str, dimensions))
            exact[column] = float(np.prod(dimensions, dtype=np.float64)) * item
            is_known[column] = True
    return shapes, exact, is_known


def grow_in_two(first: np.ndarray, last: np.ndarray) -> Bools:
    """Returns which storages are quadratic in the size: two of their dimensions grow.

    Args:
        first: Their shapes at the smallest size.
        last: Their shapes at the largest.
    """
    known: dict[tuple[str, str], bool] = {}
    square = np.zeros(len(first), dtype=np.bool_)
    for column, pair in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        if pair not in known:
            before, after = map(_dimensions, pair)
            grows = [a < b for a, b in itertools.zip_longest(before, after, fillvalue=0)]
            known[pair] = len(before) == len(after) and sum(grows) > 1
        square[column] = known[pair]
    return square


def _dimensions(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x")) if text else ()


def _grown(each: list[tuple[int, ...]], sizes: Sequence[int], size: int) -> tuple[tuple[int, ...], list[float]] | None:
    """Returns the dimensions at a size, and the elements in every step; None where they are not linear."""
    ranks = set(map(len, each))
    if ranks == {0} or len(ranks) > 1:
        return None
    at_sizes: dict[int, tuple[int, ...]] = {}
    for dimensions, one in zip(each, sizes, strict=True):
        if at_sizes.setdefault(one, dimensions) != dimensions:
            return None
    table = np.array(list(at_sizes.values()), dtype=np.float64)
    counts: list[float] = np.array(each, dtype=np.float64).prod(axis=1).tolist()
    if not all(counts) or not _on_lines(np.array(list(at_sizes), dtype=np.float64), table):
        return None
    points = np.repeat(np.array(list(at_sizes), dtype=np.float64)[:, None], table.shape[1], axis=1)
    there = np.maximum(np.rint(along(points, table, np.full(table.shape[1], float(size)))), 1)
    return tuple(int(dimension) for dimension in there), counts


def _on_lines(sizes: Floats, table: Floats) -> bool:
    """Returns whether every dimension is on one line over all sizes."""
    rises = (table[-1] - table[0]) / (sizes[-1] - sizes[0]) if len(sizes) > 1 else np.zeros(table.shape[1])
    return bool((np.abs(table[0] + rises * (sizes - sizes[0])[:, None] - table) < 1e-6).all())
