"""Numbers that were measured at a few sizes, at any other size."""

from __future__ import annotations

import numpy as np

from memprof.trace.schema import Floats


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


def bent(points: Floats, values: Floats, at: float) -> Floats:
    """The same for what may grow with the square of the size: three points that bend upwards give a parabola.

    It is followed only where all its coefficients are positive, as those of memory that grows with a size are; other
    bends (a kernel's tiles, a switch of algorithms) are followed along straight lines.

    Args:
        points: Sizes, shape ``(points,)``, rising.
        values: What was measured there, shape ``(points, columns)``.
        at: The size to go to.
    """
    straight = along(np.repeat(points[:, None], values.shape[1], axis=1), values, np.full(values.shape[1], at))
    if len(points) < 3:
        return straight
    start = int(np.clip(np.searchsorted(points, at) - 1, 0, len(points) - 3))
    x = points[start : start + 3]
    coefficients = np.linalg.solve(np.vander(x, increasing=True), values[start : start + 3])
    is_parabola = (coefficients[2] * x[2] ** 2 > 1e-6 * values[start + 2]) & (coefficients >= -0.5).all(axis=0)
    return np.where(is_parabola, np.array([1.0, at, at**2]) @ coefficients, straight)


def growing(points: Floats, values: Floats, at: Floats) -> Floats:
    """The same for times, which are noisy: they never fall as the size grows, and never below 0.

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
