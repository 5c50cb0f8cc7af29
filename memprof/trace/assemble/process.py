"""Assembles the tables and the manifest of one recorded process from its raw recording."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memprof.trace.assemble import texts
from memprof.trace.assemble.describe import build_manifest, read_speed
from memprof.trace.assemble.links import saved_for_backward
from memprof.trace.assemble.operators import durations, module_calls, operator_table, partners_by_step
from memprof.trace.assemble.recording import open_recording
from memprof.trace.assemble.steps import step_table
from memprof.trace.assemble.storages import allocator_events, memory_samples, memory_tables, workspace_bytes
from memprof.trace.manifest import Manifest
from memprof.trace.schema import (
    AllocatorEvents,
    Memory,
    ModuleCalls,
    Modules,
    Ops,
    Saved,
    Stacks,
    Steps,
    Storages,
    Table,
    Uses,
)


def assemble_process(
    folder: Path, launch: Mapping[str, Any], exit_record: Mapping[str, Any] | None
) -> tuple[Manifest, dict[type[Table], Table]] | None:
    """Assembles one process's recording; None when it recorded no operator.

    Args:
        folder: The process's folder in the spool.
        launch: What the parent wrote when it started the job.
        exit_record: What the parent wrote when the job had ended; None while it runs.

    Raises:
        OSError: The recording cannot be read.
    """
    recording = open_recording(folder)
    if recording is None:
        return None
    modules = texts.module_table(recording.spool)
    calls = module_calls(recording)
    stacks, stack_rows = texts.stack_table(recording.spool, recording.raw["stack"])
    ops = operator_table(recording, modules, calls, stack_rows)
    partners = partners_by_step(recording)
    duration_us, op_times = durations(recording, partners)
    memory = memory_tables(recording, modules, ops, partners)
    ops = ops.replace(duration_us=duration_us, workspace_bytes=workspace_bytes(memory.storages, memory.counter))
    steps = step_table(recording.spool, ops.step, recording.is_real)
    tables: dict[type[Table], Table] = {
        Modules: modules,
        ModuleCalls: calls.table,
        Steps: steps,
        Ops: ops,
        Storages: memory.storages,
        Uses: memory.uses,
        Saved: saved_for_backward(memory.uses, memory.storages, ops),
        Memory: memory_samples(recording, memory.counter),
        AllocatorEvents: allocator_events(recording),
        Stacks: stacks,
    }
    notes = (*recording.spool.records.get("notes", []), *memory.notes)
    speed = read_speed(folder, exit_record)
    manifest = build_manifest(recording, launch, exit_record, steps, ops, modules, op_times, notes, speed)
    return manifest, tables
