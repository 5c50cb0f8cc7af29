"""Numbers measured at a few sizes, interpolated and extrapolated, and shapes that grow linearly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memprof.trace.schema import Bools, Floats, read_shape

#: Relative error below which a polynomial passes through a point: floating point loss.
_EXACT = 1e-9


def along(points: Floats, values: Floats, at: Floats) -> Floats:
    """Interpolates linearly from point to point; the last two points extrapolate beyond the ends.

    Args:
        points: Where the values were measured, shape ``(points, columns)``, ascending along the first axis; columns
            whose points do not rise are constant: their last value is returned.
        values: What was measured there, shape ``(points, columns)``.
        at: Where to evaluate, shape ``(columns,)``.

    Returns:
        The values there, shape ``(columns,)``.
    """
    # The segment that ends at the first point at or after the position.
    end = np.clip((points < at).sum(axis=0), 1, len(points) - 1)
    column = np.arange(values.shape[1])
    x0, x1 = points[end - 1, column], points[end, column]
    y0, y1 = values[end - 1, column], values[end, column]
    rises = x1 > x0
    slope = np.divide(y1 - y0, x1 - x0, out=np.zeros(len(column)), where=rises)
    found: Floats = np.where(rises, y1 + slope * (at - x1), values[-1])
    return found


def growing(points: Floats, values: Floats, at: Floats) -> Floats:
    """Interpolates times linearly too; since they are noisy, the result is non-decreasing in size and non-negative.

    Args:
        points: As in ``along``.
        values: As in ``along``; where one is NaN, so is the result.
        at: As in ``along``.
    """
    found = along(points, values, at)
    # Measured longer at the smaller size: noise, so use the longest.
    falls = (np.diff(values, axis=0) < 0).any(axis=0)
    found = np.where(falls & (at >= points[0]), values.max(axis=0), found)
    # A line that is negative at 0 rises too steeply: use the line from 0 through the last point instead.
    share = np.divide(at, points[-1], out=np.ones(len(at)), where=points[-1] > 0)
    is_steep = ~falls & (along(points, values, np.zeros(len(at))) < 0)
    found = np.where(is_steep, values[-1] * share, found)
    found = np.where(falls & (at < points[0]), values.min(axis=0) * share, found)
    return np.maximum(found, 0.0)


@dataclass(frozen=True, eq=False)
class Fit:
    """Columns of numbers at a size, fitted to measurements at others.

    Attributes:
        likely: Estimate of each, shape ``(columns,)``.
        most: Upper bound of each; equal to the estimate where the fit is sure.
        is_sure: Which columns are constant, or on a line or a parabola through every point measured.
    """

    likely: Floats
    most: Floats
    is_sure: Bools


def fit(sizes: Floats, low: Floats, high: Floats, at: float, *, may_be_square: bool) -> Fit:
    """Fits each column with the simplest polynomial in the size through all its points: constant, line or parabola.

    Two sizes cannot distinguish a line from a parabola: where that matters, the line is the estimate and the steepest
    parabola without a negative coefficient the upper bound. Three do not confirm a parabola, so it has to bend upwards
    as memory does. A column that none of them fits (a kernel that pads to tiles, or switches its algorithm) is guessed:
    by a non-negative least-squares parabola beyond the points, by straight lines between them; the upper bound adds the
    largest residual, in proportion to the size.

    Args:
        sizes: The sizes, ascending, shape ``(sizes,)``.
        low: The minimum measured at each, shape ``(sizes, columns)``.
        high: The maximum; equal where a size was measured once.
        at: The size to evaluate.
        may_be_square: Whether columns may be quadratic in the size, like attention in the sequence length.
    """
    agrees = (low == high).all(axis=0)
    is_constant = agrees & (high == high[0]).all(axis=0)
    line, on_line = _through(sizes, high, at, 1)
    likely, is_sure = np.where(is_constant, high[-1], line), is_constant.copy()
    if len(sizes) == 2:
        is_sure |= agrees & (not may_be_square or sizes[0] <= at <= sizes[1])
    elif len(sizes) > 2:
        is_sure |= agrees & on_line
        curve, on_curve = _through(sizes, high, at, 2)
        if len(sizes) == 3:
            on_curve &= _bends_upwards(sizes, high)
        is_curve = agrees & on_curve & ~is_sure
        likely, is_sure = np.where(is_curve, curve, likely), is_sure | is_curve
    likely = np.asarray(likely, dtype=np.float64)
    most = likely.copy()
    for column in np.flatnonzero(~is_sure).tolist():
        likely[column], most[column] = _guessed(sizes, high[:, column], at, may_be_square=may_be_square)
    return Fit(likely, most, is_sure)


def _through(sizes: Floats, values: Floats, at: float, degree: int) -> tuple[Floats, Bools]:
    """Returns a polynomial through the ends (and the middle), and which columns have all their points on it."""
    rows = np.array([0, len(sizes) - 1] if degree == 1 else [0, len(sizes) // 2, len(sizes) - 1])
    if len(sizes) == 1:
        return values[0].copy(), np.ones(values.shape[1], dtype=np.bool_)
    # Lagrange: the weight of each point at a position.
    places = np.append(sizes, at)
    weights = np.ones((len(places), len(rows)))
    for number, row in enumerate(rows):
        for other in rows[rows != row]:
            weights[:, number] *= (places - sizes[other]) / (sizes[row] - sizes[other])
    found = weights @ values[rows]
    is_met = (np.abs(found[:-1] - values) <= _EXACT * np.maximum(np.abs(values), 1.0)).all(axis=0)
    return found[-1], is_met


def _bends_upwards(sizes: Floats, values: Floats) -> Bools:
    """Returns which columns of three points are on a parabola whose coefficients are all positive."""
    coefficients = np.linalg.solve(np.vander(sizes, increasing=True), values)
    bends: Bools = (coefficients[2] * sizes[2] ** 2 > 1e-6 * values[2]) & (coefficients >= -0.5).all(axis=0)
    return bends


def _guessed(sizes: Floats, values: Floats, at: float, *, may_be_square: bool) -> tuple[float, float]:
    """Returns the estimate and the upper bound of a column that no polynomial fits."""
    from scipy.optimize import nnls  # slow to import, and needed only here

    line = float(along(sizes[:, None], values[:, None], np.array([at]))[0])
    if at in sizes:
        return line, line
    if sizes[0] < at < sizes[-1]:
        return line, max(line, float(values[sizes > at].min()), float(values[sizes < at].max()))
    if len(sizes) < 3 or values.min() < 0:
        steep = line
        if may_be_square and at > sizes[-1] and values[-1] > values[0]:
            squares = (at**2 - sizes[-1] ** 2) / (sizes[-1] ** 2 - sizes[0] ** 2)
            steep = float(values[-1] + (values[-1] - values[0]) * squares)
        return line, max(line, steep)
    powers = sizes[:, None] / sizes[-1]
    basis = np.hstack([np.ones_like(powers), powers, powers**2] if may_be_square else [np.ones_like(powers), powers])
    scale = max(float(values.max()), 1.0)
    coefficients, _ = nnls(basis, values / scale)
    reach = at / sizes[-1]
    found = scale * float(np.array([1.0, reach, reach**2])[: len(coefficients)] @ coefficients)
    above = float((values - scale * (basis @ coefficients)).max()) * max(1.0, reach)
    return found, found + max(above, 0.0)


def smoothed(points: Floats, values: Floats, at: Floats) -> Floats:
    """Fits noisy times with a line each: least squares, non-negative and non-decreasing.

    Args:
        points: Where they were measured, shape ``(points, columns)``.
        values: The times, shape ``(points, columns)``; where one is NaN, so is the result.
        at: Where to evaluate, shape ``(columns,)``.
    """
    x, y = points.mean(axis=0), values.mean(axis=0)
    spread = ((points - x) ** 2).sum(axis=0)
    covariance = ((points - x) * (values - y)).sum(axis=0)
    slope = np.divide(covariance, spread, out=np.zeros(len(at)), where=spread > 0)
    # A line that is negative at 0 rises too steeply: use the line from 0 through the mean instead.
    steepest = np.divide(y, x, out=np.zeros(len(at)), where=x > 0)
    slope = np.where(np.isnan(slope), slope, np.clip(slope, 0.0, steepest))
    found: Floats = y + slope * (at - x)
    return found


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
            known[key] = _grown([read_shape(text) for text in key], sizes, size)
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
            before, after = map(read_shape, pair)
            grows = [a < b for a, b in itertools.zip_longest(before, after, fillvalue=0)]
            known[pair] = len(before) == len(after) and sum(grows) > 1
        square[column] = known[pair]
    return square


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
