"""What a light recording says of the whole run: its highest step, beside the steps that are told in full."""

from __future__ import annotations

from typing import Any

import numpy as np

from memprof.analysis.report.notes import Note
from memprof.errors import BadInputError
from memprof.trace.schema import NONE, ModulePeaks, Modules, StepPeaks
from memprof.trace.store import Trace
from memprof.units import format_bytes


def is_light(trace: Trace) -> bool:
    """Whether a trace follows a whole run, and holds no operators."""
    return trace.manifest.backend.name.endswith("-light")


def refuse_light(trace: Trace) -> None:
    """Refuses a light recording where operators are needed.

    Raises:
        BadInputError: It is one.
    """
    if is_light(trace):
        raise BadInputError(
            f"{trace.path} was recorded with --light: it holds module calls, not operators, and nothing can be "
            f"predicted from it. Record some steps in full: memprof record {trace.manifest.target or 'train.py'}"
        )


def describe_highest(trace: Trace) -> str:
    """Says in a clause which step of the run was the highest; "" where the trace is no light one."""
    peaks = trace.table(StepPeaks)
    if not len(peaks):
        return ""
    row = int(np.argmax(peaks.allocated_bytes))
    least = "at least " if peaks.how[row] == "counted" else ""
    return (
        f"of {len(peaks):,} steps, step {int(peaks.step[row])} was the highest: {least}"
        f"{format_bytes(int(peaks.allocated_bytes[row]))} in {peaks.phase[row]}"
        f"{_of_module(trace, int(peaks.module_id[row]))}"
    )


def run_notes(trace: Trace, reported_bytes: int) -> tuple[Note, ...]:
    """Writes the note on the whole run: a warning where a step that is not reported on was higher.

    Args:
        trace: The trace.
        reported_bytes: Peak of the step that is reported on.
    """
    text = describe_highest(trace)
    if not text:
        return ()
    return (Note(f"{text}.", is_warning=int(trace.table(StepPeaks).allocated_bytes.max()) > reported_bytes),)


def run_json(trace: Trace) -> dict[str, Any] | None:
    """Returns the whole run as JSON containers: the highest step, and the highest count of each module."""
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
