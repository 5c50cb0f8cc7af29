"""Caveats on a report's figures: gaps in the capture, blind spots, the source of times."""

from __future__ import annotations

import signal
from dataclasses import dataclass

import numpy as np

from memprof.trace.manifest import Capture, Manifest
from memprof.trace.schema import Steps
from memprof.trace.step import Step


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
    """Returns the notes on the figures of one step, warnings first.

    Args:
        manifest: The recording's manifest.
        steps: All steps seen.
        step: The reported step.
    """
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
    notes += manifest.notes
    return (*(Note(text, is_warning=True) for text in warnings), *(Note(text, is_warning=False) for text in notes))


def _incomplete(capture: Capture) -> str:
    end = f": it ends in {capture.ends_at}" if capture.ends_at else ""
    reasons = [capture.reason] if capture.reason else []
    if capture.exit_status is not None and capture.exit_status < 0:
        reasons.append(_signal_name(-capture.exit_status))
    elif capture.exit_status:
        reasons.append(f"exit status {capture.exit_status}")
    reason = f" ({', '.join(reasons)})" if reasons else ""
    return f"the capture is incomplete{end}{reason}."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a signal of the recording machine, unknown on this one
        return f"signal {number}"


def _short(text: str) -> str:
    """Returns the first line of a text, without its final full stop."""
    return text.strip().splitlines()[0].rstrip(".") if text.strip() else text
