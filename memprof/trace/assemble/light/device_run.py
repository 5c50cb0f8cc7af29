"""Builds a light recording of a CUDA job from its allocator's snapshot and the run's steps and modules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from memprof.errors import BadInputError
from memprof.trace.assemble.phases import phase_names
from memprof.trace.files.spool import RING_PREFIX, SNAPSHOT_AT_END, SNAPSHOT_AT_FAILURE, Spool, read_spool
from memprof.trace.importers.columns import Annotation
from memprof.trace.importers.device import DeviceHistory
from memprof.trace.importers.phases import find_phases
from memprof.trace.importers.snapshot import parse_snapshot
from memprof.trace.importers.snapshot_tables import device_tables
from memprof.trace.schema import NONE, Ops, Steps, Table, Texts


def find_snapshot(folder: Path, main: Spool) -> Path | None:
    """Returns the snapshot to use: that of the failed request if it ended the job, else the final one."""
    at_end, at_failure = folder / SNAPSHOT_AT_END, folder / SNAPSHOT_AT_FAILURE
    is_fatal = bool(main.records.get("fatal")) or not at_end.is_file()
    order = (at_failure, at_end) if is_fatal else (at_end, at_failure)
    return next((path for path in order if path.is_file()), None)


def assemble_device(path: Path, folder: Path, main: Spool) -> tuple[dict[type[Table], Table], str]:
    """Builds the tables of the device that the process used most.

    Args:
        path: The snapshot.
        folder: The process's folder in the spool.
        main: The records of the whole run.

    Returns:
        The tables, and the device's name.

    Raises:
        OSError: The snapshot cannot be read.
        BadInputError: It is damaged.
    """
    snapshot = parse_snapshot(path, path.read_bytes())
    if not snapshot.devices:
        raise BadInputError(f"{path} is a snapshot of an allocator that held nothing and recorded nothing.")
    device = max(snapshot.devices, key=lambda one: (one.facts.peak_requested_bytes, -one.number))
    peaks = main.columns("step_peaks")
    number, first = np.unique(peaks["step"], return_index=True)
    start_us = peaks["start_ns"][first] / 1000
    annotations = _annotations(device, start_us.tolist())
    tables, _ = device_tables(device, partial(find_phases, annotations=annotations), reads_modules=False)
    ops, steps = tables[Ops], tables[Steps]
    assert isinstance(ops, Ops)
    assert isinstance(steps, Steps)
    if len(annotations) > 1:
        # The history begins in the middle of a step, or before the first one.
        place = np.maximum(np.searchsorted(start_us, steps.start_us, side="right") - 1, 0)
        place[0] = max(int(np.searchsorted(start_us, np.nan_to_num(steps.start_us[0]), side="right")) - 1, 0)
        named = number[place]
        if len(np.unique(named)) == len(named):
            ops = ops.replace(step=named[ops.step])
            steps = steps.replace(step=named)
    tables |= {Ops: _with_modules(ops, folder, phase_names(main)), Steps: steps}
    return tables, device.name


def _annotations(device: DeviceHistory, starts_us: Sequence[float]) -> list[Annotation]:
    """Returns the run's steps as stretches of the history, plus the history's own annotations other than steps."""
    own = [one for one in device.annotations if not one.name.startswith("ProfilerStep")]
    steps = [Annotation(f"ProfilerStep#{place}", True, moment) for place, moment in enumerate(starts_us)]
    return sorted([*own, *steps], key=lambda one: one.time_us) if len(steps) > 1 else list(device.annotations)


def _with_modules(ops: Ops, folder: Path, names: Texts) -> Ops:
    """Assigns each allocation the innermost module called at that time; both use the same clock."""
    rings = sorted(folder.glob(f"{RING_PREFIX}*"), key=lambda path: int(path.name.removeprefix(RING_PREFIX)))
    parts = [read_spool(path).rows["marks"] for path in rings]
    marks = np.concatenate(parts) if parts else np.empty((0, 5), dtype=np.int64)
    if not len(marks):
        return ops
    moment_us, module, phase = marks[:, 0] / 1000, marks[:, 1], marks[:, 2]
    place = np.searchsorted(moment_us, ops.start_us, side="right") - 1
    is_known = (place >= 0) & ~np.isnan(ops.start_us)
    is_known[0] = False  # the row for the beginning is not an allocation
    place = np.maximum(place, 0)
    phase_names = names[phase[place]]
    # Backward is read from stacks: it runs in threads of its own, outside any module call.
    is_here = is_known & (module[place] != NONE) & (ops.phase != "backward")
    phases = ops.phase.copy()
    phases[is_here] = phase_names[is_here]
    return ops.replace(module_id=np.where(is_here, module[place], ops.module_id), phase=phases)
