"""Describes how the recorded steps of a job differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memprof.units import format_bytes, format_bytes_alike

#: Steps are reported as different where the lowest peak is below the highest by more than this share of it.
_NOTICED = 0.005
#: Maximum number of steps listed one by one.
_MOST_LISTED = 8


def describe_steps(peaks: Mapping[int, int]) -> str:
    """Describes how the peaks of the recorded steps differ: ``steps 2 to 4: 84.2, 30.7, 10.0 MiB``.

    Args:
        peaks: Peak in bytes by step number, in order.

    Returns:
        The description, "" where all peaks are nearly equal.
    """
    sizes = describe_peaks(list(peaks.values()))
    return f"steps {step_range(list(peaks))}: {sizes}" if sizes else ""


def describe_peaks(sizes: Sequence[int]) -> str:
    """Describes how the peaks of steps differ: ``84.16, 30.72, 9.95 MiB``, or their range for many steps.

    Args:
        sizes: Peak in bytes of each step, in order.

    Returns:
        The description, "" where all peaks are nearly equal.
    """
    if len(sizes) < 2 or min(sizes) >= max(sizes) * (1 - _NOTICED):
        return ""
    if len(sizes) <= _MOST_LISTED:
        return format_bytes_alike(sizes)
    middle = sorted(sizes)[(len(sizes) - 1) // 2]
    return f"{format_bytes(min(sizes))} to {format_bytes(max(sizes))}, half of them at most {format_bytes(middle)}"


def list_steps(numbers: Sequence[int]) -> str:
    """Lists a few step numbers one by one, ``2, 3, 4``, and many as a range, ``0 to 487``."""
    return step_range(numbers) if len(numbers) > _MOST_LISTED else ", ".join(map(str, numbers))


def step_range(numbers: Sequence[int]) -> str:
    """Describes step numbers as a range where they follow one another: ``2 to 4``, ``3 and 7``."""
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} {'and' if len(numbers) == 2 else 'to'} {numbers[-1]}"
    if len(numbers) > _MOST_LISTED:
        return f"{numbers[0]} to {numbers[-1]} ({len(numbers)} of them)"
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
