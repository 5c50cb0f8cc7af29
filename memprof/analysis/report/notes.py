"""Caveats on a report's figures, how the steps of a job differ, and what a variable holds that no step reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memprof.analysis.report.moments import find_peak
from memprof.analysis.report.sources import Sources
from memprof.trace.files.spool import KILLED, RAN_OUT
from memprof.trace.manifest import Capture, Manifest, signal_name
from memprof.trace.schema import NONE, Bools, Holders, Ints, Modules, Steps, Storages, Uses
from memprof.trace.step import Step
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_bytes_alike, format_percent

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


#: Less than this share of the peak is not worth a sentence.
_WORTH = 0.05
#: In a chain: where the variable, with its attributes, ends and what is inside begins.
_INSIDE = re.compile(r"\[|\._modules\b|\._parameters\b|\._buffers\b")


@dataclass(frozen=True)
class Unread:
    """What one variable holds at the peak that no recorded step reads.

    Attributes:
        variable: The variable, such as ``state`` or ``self.spare``.
        place: File and line of its first assignment, "" where unknown.
        bytes: Bytes of its storages.
        share: The same as a share of the peak.
    """

    variable: str
    place: str
    bytes: int
    share: float

    def describe(self) -> str:
        """Returns the advice in one sentence."""
        place = f" ({self.place})" if self.place else ""
        return (
            f"`{self.variable}`{place} holds {format_bytes(self.bytes)}, {format_percent(self.share)} of the peak, "
            f"that no recorded step reads: if nothing reads it later, `del {self.variable}` frees it"
        )


def find_unread(trace: Trace, step: Step, sources: Sources) -> tuple[Unread, ...]:
    """Finds the variables that hold copies of weights which no recorded step reads, most bytes first.

    Copies of weights are models that no step calls, and other tensors in the shape of a parameter: a loaded
    checkpoint, the weights before training, the best so far. A data set may be read later.
    """
    holders, storages = trace.table(Holders), trace.table(Storages)
    holders = holders.take(
        (holders.tensors == 0) & (holders.storage_id != NONE) & ~holders.is_by_graph & (holders.kind != "cycle")
    )
    if not len(holders):
        return ()
    row = np.searchsorted(storages.storage_id, holders.storage_id)
    peak = find_peak(step, sources)
    peak_bytes, moment = peak.allocated_bytes, step.first_op_id + peak.op_id
    created, freed = storages.created_op_id[row], storages.freed_op_id[row]
    is_wanted = (created < step.first_op_id) & ((freed == NONE) | (freed > moment))
    is_wanted &= ~_is_used(trace.table(Uses), storages, step.first_op_id)[row]
    shapes = storages.shape[(storages.category == "parameter") & (storages.shape != "")]
    category = storages.category[row]
    is_loose = np.isin(category, ["unknown", "temporary", "input"]) & np.isin(holders.shape, shapes)
    is_idle = np.isin(category, ["parameter", "buffer"])
    is_wanted &= is_loose | (is_idle & np.isin(storages.module_id[row], _idle_modules(trace, storages)))
    found: dict[tuple[str, int], int] = {}
    for one in np.flatnonzero(is_wanted).tolist():
        key = (_INSIDE.split(str(holders.chain[one]))[0], int(holders.stack_id[one]))
        found[key] = found.get(key, 0) + int(storages.allocated_bytes[row[one]])
    lines = {stack: sources.of_stack(stack) for _, stack in found}
    return tuple(
        Unread(variable, "" if (line := lines[stack]) is None else line.place, size, size / peak_bytes)
        for (variable, stack), size in sorted(found.items(), key=lambda one: -one[1])
        if size >= _WORTH * peak_bytes
    )


def _is_used(uses: Uses, storages: Storages, first_op_id: int) -> Bools:
    """Returns which storages any operator reads, or changes from the step of the peak on."""
    is_use = (uses.role == "read") | (uses.op_id >= first_op_id)
    used: Bools = np.isin(storages.storage_id, uses.storage_id[is_use])
    return used


def _idle_modules(trace: Trace, storages: Storages) -> Ints:
    """Returns the modules of the models none of whose memory any operator uses."""
    modules = trace.table(Modules)
    root = np.arange(len(modules))
    for place, parent in enumerate(modules.parent_id.tolist()):  # parents come before their children
        root[place] = place if parent == NONE else root[parent]
    used = np.isin(storages.storage_id, trace.table(Uses).storage_id) & (storages.module_id != NONE)
    idle: Ints = modules.module_id[~np.isin(root, root[storages.module_id[used]])]
    return idle
