"""The whole run as seen by a light recording: its highest step, in addition to the fully recorded steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from memprof.analysis.report.notes import Note
from memprof.errors import BadInputError
from memprof.trace.schema import NONE, ModulePeaks, Modules, StepPeaks
from memprof.trace.store import Trace
from memprof.units import format_bytes


def is_light(trace: Trace) -> bool:
    """Whether a trace is a light recording: it covers the whole run, without operators."""
    return trace.manifest.backend.name.endswith("-light")


def refuse_light(trace: Trace) -> None:
    """Rejects a light recording where operators are needed.

    Raises:
        BadInputError: The recording is light.
    """
    if is_light(trace):
        raise BadInputError(
            f"{trace.path} was recorded with --light: it contains module calls, not operators, so nothing can be "
            f"predicted from it. Record some steps in full: memprof record {trace.manifest.target or 'train.py'}"
        )


def describe_highest(trace: Trace) -> str:
    """Returns a clause on which step of the run peaked highest; "" where the trace is not light."""
    peaks = trace.table(StepPeaks)
    if not len(peaks):
        return ""
    row = int(np.argmax(peaks.allocated_bytes))
    least = "at least " if peaks.how[row] == "counted" else ""
    return (
        f"of {len(peaks):,} steps, step {int(peaks.step[row])} peaked highest: {least}"
        f"{format_bytes(int(peaks.allocated_bytes[row]))} in {peaks.phase[row]}"
        f"{_of_module(trace, int(peaks.module_id[row]))}"
    )


def run_notes(trace: Trace, reported_bytes: int) -> tuple[Note, ...]:
    """Returns the note on the whole run: a warning where a step other than the reported one was higher.

    Args:
        trace: The trace.
        reported_bytes: Peak of the reported step.
    """
    text = describe_highest(trace)
    if not text:
        return ()
    return (Note(f"{text}.", is_warning=int(trace.table(StepPeaks).allocated_bytes.max()) > reported_bytes),)


def run_json(trace: Trace) -> dict[str, Any] | None:
    """Returns the whole run as JSON containers: the highest step, and the peak of each module."""
    peaks, places = trace.table(StepPeaks), trace.table(ModulePeaks)
    if not len(peaks):
        return None
    row = int(np.argmax(peaks.allocated_bytes))
    modules = trace.table(Modules)

    def module(number: int) -> str | None:
        return None if number == NONE else str(modules.name[number] or modules.type[number])

    return {
        "steps": len(peaks),
        "highest": {
            "step": int(peaks.step[row]),
            "phase": str(peaks.phase[row]),
            "module": module(int(peaks.module_id[row])),
            "allocated_bytes": int(peaks.allocated_bytes[row]),
            "how": str(peaks.how[row]),
        },
        "by_module": [
            {"phase": phase, "module": module(number), "step": step, "allocated_bytes": size}
            for phase, number, step, size in zip(
                places.phase.tolist(),
                places.module_id.tolist(),
                places.step.tolist(),
                places.allocated_bytes.tolist(),
                strict=True,
            )
        ],
    }


def _of_module(trace: Trace, number: int) -> str:
    if number == NONE:
        return ""
    modules = trace.table(Modules)
    return f" of {modules.name[number] or modules.type[number]}"
