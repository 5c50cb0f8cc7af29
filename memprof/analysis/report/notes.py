"""Caveats on a report's figures, and how the recorded steps of a job differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memprof.trace.files.spool import KILLED, RAN_OUT
from memprof.trace.manifest import Capture, Manifest, signal_name
from memprof.trace.schema import Steps
from memprof.trace.step import Step
from memprof.units import format_bytes, format_bytes_alike

#: Steps are reported as different where the lowest peak is below the highest by more than this share of it.
_NOTICED = 0.005
#: Maximum number of steps listed one by one.
_MOST_LISTED = 8


@dataclass(frozen=True)
class Note:
    """One sentence about the figures.

    Attributes:
        text: The sentence.
        is_warning: Whether the figures may mislead without it.
    """

    text: str
    is_warning: bool


def write_notes(manifest: Manifest, steps: Steps, step: Step) -> tuple[Note, ...]:
    """Returns the notes on the figures of one step, warnings first."""
    warnings = []
    if not manifest.capture.is_complete:
        warnings.append(_incomplete(manifest.capture))
    row = int(np.flatnonzero(steps.step == step.number)[0])
    if steps.kind[row] == "warm_up":
        warnings.append(
            f"step {step.number} is a warm-up step: optimizer state and workspaces may be missing or first allocated "
            "in it."
        )
    if not steps.is_complete[row]:
        is_evaluation = manifest.capture.is_complete and step.number >= manifest.window.skip + manifest.window.steps
        why = "only one batch of its evaluation was recorded" if is_evaluation else "the recording ends during it"
        warnings.append(f"step {step.number} is incomplete: {why}.")
    notes = []
    if steps.micro_batches[row] > 1:
        notes.append(f"a step runs {steps.micro_batches[row]} rounds of forward and backward.")
    notes += [f"not seen by {manifest.backend.name}: {_short(text)}" for text in manifest.backend.blind_spots]
    warnings = [note for note in manifest.notes if note.startswith((RAN_OUT, KILLED))] + warnings
    notes += [note for note in manifest.notes if not note.startswith((RAN_OUT, KILLED))]
    return (*(Note(text, is_warning=True) for text in warnings), *(Note(text, is_warning=False) for text in notes))


def _incomplete(capture: Capture) -> str:
    end = f": it ends in {capture.ends_at}" if capture.ends_at else ""
    reasons = [capture.reason] if capture.reason else []
    if capture.exit_status is not None and capture.exit_status < 0:
        reasons.append(signal_name(-capture.exit_status))
    elif capture.exit_status:
        reasons.append(f"exit status {capture.exit_status}")
    reason = f" ({', '.join(reasons)})" if reasons else ""
    return f"the capture is incomplete{end}{reason}."


def _short(text: str) -> str:
    """Returns the first line of a text, without its final full stop."""
    return text.strip().splitlines()[0].rstrip(".") if text.strip() else text


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
