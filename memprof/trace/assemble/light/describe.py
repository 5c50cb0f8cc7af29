"""Builds the manifest of a lightly recorded process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from memprof.trace.assemble.describe import describe_end, describe_start, machine_of, read_speed
from memprof.trace.assemble.light.run import Run
from memprof.trace.files.size_limit import describe_fault
from memprof.trace.files.spool import Spool
from memprof.trace.manifest import Backend, Capture, Manifest, Window
from memprof.trace.schema import NONE, Modules, Steps, Table

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


def light_manifest(
    folder: Path,
    main: Spool,
    run: Run,
    tables: Mapping[type[Table], Table],
    launch: Mapping[str, Any],
    exit_record: Mapping[str, Any] | None,
) -> Manifest:
    """Builds the manifest.

    Args:
        folder: The process's folder in the spool.
        main: The records of the whole run.
        run: The steps of the run.
        tables: The tables built so far.
        launch: The launch record that the parent process wrote when it started the job.
        exit_record: The exit record that the parent wrote at the end; None while the job runs.
    """
    common = describe_start(main, launch, read_speed(folder, exit_record))
    modules = cast(Modules, tables[Modules])
    is_cuda = run.device != "cpu"
    return replace(
        common,
        machine=machine_of(main, run.device, common.machine),
        backend=CUDA_LIGHT if is_cuda else CPU_LIGHT,
        capture=_capture(main, exit_record, run, modules),
        window=Window(steps=len(run)),
        op_times="none",
        notes=tuple(_notes(main, tables)),
    )


def _capture(main: Spool, exit_record: Mapping[str, Any] | None, run: Run, modules: Modules) -> Capture:
    end = next(iter(main.records.get("end", [])), None)
    status = None if exit_record is None else exit_record.get("returncode")
    faults = main.records.get("faults", [])
    if end is not None and not faults and not status:
        return Capture(is_complete=True, reason=end["reason"], exit_status=status)
    place = run.place_at_end(modules, None if end is None else end["failed_at"])
    if faults:
        reason = describe_fault(faults[0])
    else:
        reason = describe_end(exit_record, "" if end is None else end["reason"])
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
