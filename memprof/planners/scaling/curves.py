"""Numbers that were measured at a few sizes, at any other size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from memprof.trace.schema import Bools, Floats

#: A point is met where a polynomial is off by less than this share of it: what floats lose.
_EXACT = 1e-9


def along(points: Floats, values: Floats, at: Floats) -> Floats:
    """Follows straight lines from point to point, and the last two beyond the ends.

    Args:
        points: Where the values were measured, shape ``(points, columns)``, rising along the first axis; columns
            whose points do not rise are constant: their last value is returned.
        values: What was measured there, shape ``(points, columns)``.
        at: Where to go, shape ``(columns,)``.

    Returns:
        The values there, shape ``(columns,)``.
    """
    # The segment whose end is the first point at or behind the place.
    end = np.clip((points < at).sum(axis=0), 1, len(points) - 1)
    column = np.arange(values.shape[1])
    x0, x1 = points[end - 1, column], points[end, column]
    y0, y1 = values[end - 1, column], values[end, column]
    rises = x1 > x0
    slope = np.divide(y1 - y0, x1 - x0, out=np.zeros(len(column)), where=rises)
    found: Floats = np.where(rises, y1 + slope * (at - x1), values[-1])
    return found


def growing(points: Floats, values: Floats, at: Floats) -> Floats:
    """Follows times along straight lines too; they are noisy: they never fall as the size grows, and never below 0.

    Args:
        points: As in ``along``.
        values: As in ``along``; where one is NaN, so is the answer.
        at: As in ``along``.
    """
    found = along(points, values, at)
    # Measured longer at the smaller size: noise, so the longest.
    falls = (np.diff(values, axis=0) < 0).any(axis=0)
    found = np.where(falls & (at >= points[0]), values.max(axis=0), found)
    # A line through the points that is below nothing at 0 rises too steeply: from 0 through the last point instead.
    share = np.divide(at, points[-1], out=np.ones(len(at)), where=points[-1] > 0)
    is_steep = ~falls & (along(points, values, np.zeros(len(at))) < 0)
    found = np.where(is_steep, values[-1] * share, found)
    found = np.where(falls & (at < points[0]), values.min(axis=0) * share, found)
    return np.maximum(found, 0.0)


@dataclass(frozen=True, eq=False)
class Fit:
    """Columns of numbers at a size, from what was measured at others.

    Attributes:
        likely: The value of each, shape ``(columns,)``.
        most: The most that it may be; the same where the fit is sure.
        is_sure: Which columns are constant, or on a line or a parabola through every point measured.
    """

    likely: Floats
    most: Floats
    is_sure: Bools


def fit(sizes: Floats, low: Floats, high: Floats, at: float, *, may_be_square: bool) -> Fit:
    """Fits each column by the simplest polynomial in the size that meets all its points: constant, line or parabola.

    Two sizes cannot tell a line from a parabola: where that matters, the line is likely and the steepest parabola
    without a negative coefficient is the most. Three do not confirm one, so it has to bend upwards as memory does.
    A column that meets none of them (a kernel that pads to tiles, or switches its algorithm) is guessed: by a
    non-negative least-squares parabola beyond the points, by straight lines between them; the most is larger by the
    largest residual, in proportion to the size.

    Args:
        sizes: The sizes, rising, shape ``(sizes,)``.
        low: The least that was measured at each, shape ``(sizes, columns)``.
        high: The most; where a size was measured once, the same.
        at: The size to go to.
        may_be_square: Whether columns may grow with the square of the size, as those of attention with the length.
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
    # Lagrange: what each of the points weighs at a place.
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
    """Returns what a column that no polynomial meets may be at a size, and the most that it may be."""
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
    """Fits times, which are noisy, by a line each: by least squares, never below 0, and never falling.

    Args:
        points: Where they were measured, shape ``(points, columns)``.
        values: The times, shape ``(points, columns)``; where one is NaN, so is the answer.
        at: Where to go, shape ``(columns,)``.
    """
    x, y = points.mean(axis=0), values.mean(axis=0)
    spread = ((points - x) ** 2).sum(axis=0)
    covariance = ((points - x) * (values - y)).sum(axis=0)
    slope = np.divide(covariance, spread, out=np.zeros(len(at)), where=spread > 0)
    # A line that is below nothing at 0 rises too steeply: from 0 through the middle instead.
    steepest = np.divide(y, x, out=np.zeros(len(at)), where=x > 0)
    slope = np.where(np.isnan(slope), slope, np.clip(slope, 0.0, steepest))
    found: Floats = y + slope * (at - x)
    return found
