"""Assembles the tables and manifest of one lightly recorded process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from memprof.errors import BadInputError
from memprof.trace.assemble import texts
from memprof.trace.assemble.describe import JobRecords, describe_start, machine_of
from memprof.trace.assemble.device_events import heap_samples
from memprof.trace.assemble.light.run import Run, join_steps, module_peaks, read_run
from memprof.trace.assemble.light.stretch import choose_stretch, ordinary_spool
from memprof.trace.assemble.memory.holders import holder_table
from memprof.trace.assemble.phases import phase_names
from memprof.trace.assemble.process import assemble_all
from memprof.trace.files.private_file import describe_fault
from memprof.trace.files.spool import LIGHT_FOLDER, RING_PREFIX, SNAPSHOT_AT_END, SNAPSHOT_AT_FAILURE, Spool, read_spool
from memprof.trace.importers.columns import Annotation
from memprof.trace.importers.device import DeviceHistory
from memprof.trace.importers.phases import find_phases
from memprof.trace.importers.snapshot import read_snapshot
from memprof.trace.importers.snapshot_tables import device_tables
from memprof.trace.manifest import Backend, Capture, Manifest, Window
from memprof.trace.schema import (
    ELSEWHERE,
    NONE,
    Holders,
    HostHeap,
    ModulePeaks,
    Modules,
    Ops,
    Stacks,
    StepPeaks,
    Steps,
    Storages,
    Table,
    Texts,
)

#: Name of memory that predates the stretch and is held by no model or optimizer.
_OLDER = "older than the stretch, held by no model and no optimizer"


def is_light(folder: Path) -> bool:
    """Whether a process was recorded lightly."""
    return (folder / LIGHT_FOLDER).is_dir()


def assemble_light(job: JobRecords) -> tuple[Manifest, dict[type[Table], Table]] | None:
    """Assembles one process's light recording; None when nothing was recorded.

    Raises:
        OSError: The recording cannot be read.
        BadInputError: The snapshot of a device's history is damaged.
    """
    folder = job.folder
    main = read_spool(folder / LIGHT_FOLDER)
    if not main.records.get("start") or not len(main.rows["step_peaks"]):
        return None
    snapshot = find_snapshot(folder / LIGHT_FOLDER, main)
    device = str(main.records.get("counted_device", ["cpu"])[-1])
    modules = texts.module_table(main)
    tables: dict[type[Table], Table] = {Modules: modules}
    if snapshot is not None:
        found, device = assemble_device(snapshot, folder, main)
        tables |= found
    elif device == "cpu":
        tables |= _stretch_tables(job, main)
    if Holders not in tables:
        stacks = cast(Stacks, tables.get(Stacks, Stacks.empty()))
        tables[Holders], tables[Stacks] = holder_table(main, None, stacks)
    run = read_run(main, device)
    recorded = cast(Steps, tables.get(Steps, Steps.empty()))
    tables[Steps] = join_steps(run.steps(), recorded)
    tables[StepPeaks] = run.step_peaks()
    tables[HostHeap] = heap_samples(main)
    tables[ModulePeaks] = module_peaks(main, device)
    common = describe_start(main, job)
    manifest = replace(
        common,
        machine=machine_of(main, run.device, common.machine),
        backend=CPU_LIGHT if run.device == "cpu" else CUDA_LIGHT,
        capture=_capture(main, job, run, cast(Modules, tables[Modules])),
        window=Window(steps=len(run)),
        op_times="none",
        notes=tuple(_notes(main, tables)),
    )
    return manifest, tables


def _stretch_tables(job: JobRecords, main: Spool) -> dict[type[Table], Table]:
    stretch = choose_stretch(job.folder)
    if stretch is None:
        return {}
    found = assemble_all(job, ordinary_spool(main, stretch))
    if not found:
        return {}
    tables = found[0][1]
    return {**tables, Storages: _categorised(cast(Storages, tables[Storages]), cast(Ops, tables[Ops]))}


def _categorised(storages: Storages, ops: Ops) -> Storages:
    """Marks activations by lifetime, since uses are not recorded: created in forward, freed in backward."""
    category, name = storages.category.copy(), storages.name.copy()
    has_both = (storages.created_op_id != NONE) & (storages.freed_op_id != NONE)
    born, died = storages.created_op_id[has_both], storages.freed_op_id[has_both]
    is_kept = (ops.phase[born] == "forward") & (ops.phase[died] != "forward")
    rows = np.flatnonzero(has_both)[is_kept]
    rows = rows[category[rows] == "temporary"]
    category[rows] = "activation"
    is_older = (storages.created_op_id == NONE) & (name == ELSEWHERE)
    name[is_older] = _OLDER
    return storages.replace(category=category, name=name)


def find_snapshot(folder: Path, main: Spool) -> Path | None:
    """Returns the snapshot to use: that of the failed request if it ended the job, else the final one."""
    at_end, at_failure = folder / SNAPSHOT_AT_END, folder / SNAPSHOT_AT_FAILURE
    is_fatal = bool(main.records.get("fatal")) or not at_end.is_file()
    order = (at_failure, at_end) if is_fatal else (at_end, at_failure)
    return next((path for path in order if path.is_file()), None)


def assemble_device(path: Path, folder: Path, main: Spool) -> tuple[dict[type[Table], Table], str]:
    """Builds the tables of the device that the process used most.

    Returns:
        The tables, and the device's name.

    Raises:
        OSError: The snapshot cannot be read.
        BadInputError: It is damaged.
    """
    snapshot = read_snapshot(path, path.read_bytes())
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


_NO_OPERATORS = "operators: rows are module calls, backward nodes and updates, and no operator's cost is known"

CPU_LIGHT = Backend(
    name="cpu-light",
    sees=(
        "every allocation of torch's CPU allocator on the training thread, in the steps recorded in detail",
        "the allocator's count of all threads, at each module call and update of the whole run",
    ),
    blind_spots=(
        _NO_OPERATORS,
        "what came and went inside a module call or in backward, in steps that were only counted",
        "allocations on other threads of the job, but for their sum",
        "Python stacks of allocations",
        "memory that torch's allocator does not own (numpy, shared memory, libraries' own workspaces)",
    ),
)

CUDA_LIGHT = Backend(
    name="cuda-light",
    sees=(
        "the last entries of CUDA's memory history with their Python stacks, and all that was in use at its end",
        "the allocator's count at each model call and update of the whole run, and its highest count",
    ),
    blind_spots=(
        _NO_OPERATORS,
        "allocations before the history's first entry, one by one",
        "which module backward belongs to",
        "memory that torch's CUDA allocator does not own (NCCL, cuBLAS handles, the CUDA context)",
        "the CUDA history of a killed job is lost: only counts are left",
    ),
)


def _capture(main: Spool, job: JobRecords, run: Run, modules: Modules) -> Capture:
    end = next(iter(main.records.get("end", [])), None)
    status = job.exit_status
    faults = main.records.get("faults", [])
    if end is not None and not faults and not status:
        return Capture(is_complete=True, reason=end["reason"], exit_status=status)
    place = run.place_at_end(modules, None if end is None else end["failed_at"])
    if faults:
        reason = describe_fault(faults[0])
    else:
        reason = job.describe_end("" if end is None else end["reason"])
    return Capture(is_complete=False, ends_at=place, reason=reason, exit_status=status)


def _notes(main: Spool, tables: Mapping[type[Table], Table]) -> list[str]:
    steps = cast(Steps, tables[Steps])
    recorded = steps.step[steps.first_op_id != NONE]
    notes = []
    if len(recorded) > 1:
        notes.append(
            f"every allocation is recorded in steps {int(recorded[0])} to {int(recorded[-1])}; of the others, counts"
        )
    elif len(recorded):
        notes.append(f"every allocation is recorded in step {int(recorded[0])}; of the others, counts")
    if not main.records["start"][0].get("can_count", True):
        notes.append("this torch does not expose its CPU count: other steps have no highest count")
    return [*notes, *main.records.get("notes", [])]
