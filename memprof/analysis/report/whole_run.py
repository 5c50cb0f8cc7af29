"""The run beside its recorded steps: its highest step, how full the device was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from memprof.analysis.report.notes import Note
from memprof.errors import BadInputError
from memprof.trace.files.coded import Coded
from memprof.trace.manifest import LaterPeak
from memprof.trace.schema import NONE, DeviceMemory, ModulePeaks, Modules, StepPeaks
from memprof.trace.store import Trace
from memprof.units import format_bytes

#: Device of a peak of resident memory.
_HOST = "cpu"
#: Peaks that differ by less than this share count as equal: the allocator may count a scalar more.
ALIKE = 0.002


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
    """Returns the note on the whole run: a warning where a step other than the recorded or reported was higher."""
    text, later = describe_highest(trace), describe_later(trace)
    if not text:
        return (Note(later, is_warning=True),) if later else ()
    return (Note(f"{text}.", is_warning=int(trace.table(StepPeaks).allocated_bytes.max()) > reported_bytes),)


def describe_later(trace: Trace) -> str:
    """Returns a sentence on the step that peaked above the recorded ones; "" where none did."""
    later = trace.manifest.later
    rise_bytes = later_rise(later, trace.step_peaks()) if later.step >= 0 else 0
    if not rise_bytes:
        return ""
    where = f"{later.phase}{' from' if later.line else ''} {later.line}".strip()
    before = "anything before" if later.peak_bytes - rise_bytes == later.window_bytes else "the recorded steps"
    took = f"took {format_bytes(rise_bytes)} more than {before}: its peak is {format_bytes(later.peak_bytes)}"
    if later.device == _HOST:
        took = f"raised the peak of the process's resident memory by {format_bytes(rise_bytes)}"
    first, last = later.step, later.step + later.steps - 1
    step = {1: f"Step {first}", 2: f"Step {first} or {last}"}.get(later.steps, f"One of steps {first} to {last}")
    return f"{step}{where and f' ({where})'} {took}; record it with --skip {first} --steps {later.steps}."


def later_rise(later: LaterPeak, peaks: dict[int, int]) -> int:
    """Returns by how much a later peak is above its counter before and above the recorded steps' peaks; 0 if alike."""
    before = max((later.window_bytes, *(peaks.values() if later.device != _HOST else ())))
    return later.peak_bytes - before if later.peak_bytes >= (1 + ALIKE) * before else 0


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


@dataclass(frozen=True)
class DeviceUse:
    """One device at its fullest moment. All in bytes; the parts sum to the total.

    Attributes:
        device: Such as ``cuda:0``.
        total_bytes: Memory of the device.
        reserved_bytes: Segments of torch's caching allocator in the recorded process.
        own_bytes: Memory of that process outside the allocator: the CUDA context, NCCL, libraries. None where the
            driver reports no per-process memory; it is then included in ``other_bytes``.
        other_bytes: Everything else in use.
        free_bytes: Free memory.
        pinned_bytes: Host memory pinned by torch, not part of the device's; None where unknown.
    """

    device: str
    total_bytes: int
    reserved_bytes: int
    own_bytes: int | None
    other_bytes: int
    free_bytes: int
    pinned_bytes: int | None

    @property
    def used_bytes(self) -> int:
        """Used bytes as shown by nvidia-smi."""
        return self.total_bytes - self.free_bytes


def summarise_devices(samples: DeviceMemory) -> tuple[DeviceUse, ...]:
    """Returns each device at its fullest sample, ordered by name."""
    found = []
    coded = Coded.of(samples.device)  # numpy ignores trailing zero bytes when comparing texts
    present = np.unique(coded.codes).tolist()
    for code in sorted(present, key=lambda code: str(coded.distinct[code])):
        device, own = coded.distinct[code], samples.take(coded.codes == code)
        fullest = int(np.argmax(own.used_bytes))
        used, reserved, process, pinned = (
            int(column[fullest]) for column in (own.used_bytes, own.reserved_bytes, own.process_bytes, own.pinned_bytes)
        )
        # The driver's and torch's numbers in a sample are not read at the same instant.
        beside = max(used - reserved, 0)
        of_process = None if process == NONE else min(max(process - reserved, 0), beside)
        found.append(
            DeviceUse(
                device=str(device),
                total_bytes=int(own.total_bytes[fullest]),
                reserved_bytes=used - beside,
                own_bytes=of_process,
                other_bytes=beside - (of_process or 0),
                free_bytes=int(own.total_bytes[fullest]) - used,
                pinned_bytes=None if pinned == NONE else pinned,
            )
        )
    return tuple(found)
