"""Divides an nn.Sequential into segments, by a rule shared by prediction and application."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from memprof.errors import PolicyError


def split(count: int, segments: int) -> list[tuple[int, int]]:
    """Divides modules into consecutive segments of equal length, or with the first ones one module longer.

    Args:
        count: Number of modules.
        segments: Number of segments, at most ``count``.

    Returns:
        The first module of each segment and the one after its last.
    """
    size, longer = divmod(count, segments)
    edges = [number * size + min(number, longer) for number in range(segments + 1)]
    return list(pairwise(edges))


def longest_sequence(candidates: Sequence[tuple[str, int]]) -> str:
    """Returns the nn.Sequential with most modules, the first of several.

    Args:
        candidates: Name and number of modules of each nn.Sequential.

    Raises:
        PolicyError: There is none.
    """
    if not candidates:
        raise PolicyError(
            "segments requires an nn.Sequential, and the model has none; choose modules by patterns instead."
        )
    return max(candidates, key=lambda candidate: candidate[1])[0]
