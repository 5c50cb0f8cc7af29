"""Assembles the tables and manifest of one recorded process from its raw recording, its optimizers among them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from memprof.trace.assemble import texts
from memprof.trace.assemble.allocator_history import segment_table
from memprof.trace.assemble.describe import JobRecords, build_manifest
from memprof.trace.assemble.device_events import allocator_events, device_samples, heap_samples
from memprof.trace.assemble.join import join
from memprof.trace.assemble.links import saved_for_backward
from memprof.trace.assemble.local_variables import forget_held, held_by_variables
from memprof.trace.assemble.memory.failures import failure_table, kept_for_backward
from memprof.trace.assemble.memory.holders import holder_table, need_table, with_graphs
from memprof.trace.assemble.memory.native_events import CPU
from memprof.trace.assemble.memory.storages import memory_samples, memory_tables, workspace_bytes
from memprof.trace.assemble.operators import durations, module_calls, operator_table, partners_by_step
from memprof.trace.assemble.phases import notes_on_evaluation, trains_in_training_mode
from memprof.trace.assemble.recording import Recording, open_later, open_recordings
from memprof.trace.assemble.statements import forget_functions
from memprof.trace.assemble.steps import step_table
from memprof.trace.assemble.times import roofline, with_roofline
from memprof.trace.files.spool import DRY_RUN, FLAG_IN_REGION, Spool
from memprof.trace.manifest import Manifest
from memprof.trace.schema import (
    NONE,
    AllocatorEvents,
    DeviceMemory,
    Holders,
    HostHeap,
    HostNeeds,
    Memory,
    ModuleCalls,
    Modules,
    Ops,
    Optimizers,
    OutOfMemory,
    ReadValues,
    Saved,
    Segments,
    Stacks,
    Steps,
    Storages,
    Table,
    Uses,
)
from memprof.trace.source_lines import forget_changed_sources


def assemble_all(job: JobRecords, spool: Spool) -> list[tuple[Manifest, dict[type[Table], Table]]]:
    """Assembles a raw recording, once for each device; see ``memprof.trace.assemble.assemble_devices``."""
    recordings = open_recordings(spool)
    devices = tuple(recording.memory_events.device for recording in recordings)
    if forget_changed_sources():
        forget_functions()
        forget_held()
    return [_assemble(job, recording, devices) for recording in recordings]


def _assemble(
    job: JobRecords, recording: Recording, devices: tuple[str, ...]
) -> tuple[Manifest, dict[type[Table], Table]]:
    part = _tables(recording, job)
    tables, on_evaluation = part.tables, part.on_evaluation
    for later in open_later(recording.spool, recording.memory_events.device):
        more = _tables(later, job, part)
        tables, on_evaluation = join(tables, more.tables), more.on_evaluation or on_evaluation
    notes = (
        *recording.spool.records.get("notes", []),
        *part.notes,
        *on_evaluation,
        *_device_notes(recording.memory_events.device, devices),
    )
    return build_manifest(recording, job, tables, part.op_times, notes), tables


@dataclass(frozen=True)
class _Part:
    """A stretch of the recording without a gap.

    Attributes:
        tables: Its tables.
        notes: Caveats for the reader.
        has_trained: Whether the job has trained, in training mode only.
        on_evaluation: A note on evaluation, if there is something to say of it.
        op_times: Source of the operator durations.
    """

    tables: dict[type[Table], Table]
    notes: tuple[str, ...]
    has_trained: bool
    on_evaluation: tuple[str, ...]
    op_times: str


def _tables(recording: Recording, job: JobRecords, before: _Part | None = None) -> _Part:
    """Builds the tables of a stretch; one after the first ran other sizes than the timed step."""
    modules = texts.module_table(recording.spool)
    calls = module_calls(recording)
    stacks, stack_rows = texts.stack_table(recording.spool, recording.raw["stack"])
    ops = operator_table(recording, modules, calls, stack_rows)
    partners = partners_by_step(recording)
    is_dry = recording.epoch.source == DRY_RUN
    timed = {} if before is not None and recording.memory_events.device == CPU else partners
    memory = memory_tables(recording, modules, ops, partners)
    if is_dry:
        duration_us, op_times = roofline(recording, ops, memory.storages, memory.uses, job.speed)
    else:
        duration_us, op_times = durations(recording, timed)
    ops = ops.replace(duration_us=duration_us, workspace_bytes=workspace_bytes(memory.storages, memory.counter))
    steps = step_table(recording.spool, ops.step, recording.is_real)
    steps = with_roofline(steps, ops) if is_dry else steps
    is_inside = recording.spread((recording.raw["flags"] & FLAG_IN_REGION) != 0, fill=False)
    failures, stacks = failure_table(recording, ops, stacks, job.exit_record)
    # Compiled code has no variables of the job's.
    eager = ops.replace(stack_id=np.where(is_inside, NONE, ops.stack_id))
    held = held_by_variables(eager, memory.storages, memory.uses, calls.table, stacks)
    holders, stacks = holder_table(recording.spool, memory.held, stacks)
    needs, stacks = need_table(recording.spool, stacks)
    holders = with_graphs(recording, holders, ops, memory.storages)
    tables: dict[type[Table], Table] = {
        Modules: modules,
        ModuleCalls: calls.table,
        Steps: steps,
        Ops: ops,
        Storages: kept_for_backward(memory.storages.replace(held_op_id=held), failures, ops),
        Uses: memory.uses,
        Saved: saved_for_backward(memory.uses, memory.storages, ops, is_inside),
        Memory: memory_samples(recording, memory.counter),
        AllocatorEvents: allocator_events(recording),
        Segments: segment_table(recording.spool, recording.epoch, recording.memory_events.device),
        DeviceMemory: device_samples(recording.spool),
        HostHeap: heap_samples(recording.spool),
        HostNeeds: needs,
        OutOfMemory: failures,
        Holders: holders,
        Optimizers: optimizer_table(recording.spool),
        ReadValues: texts.read_value_table(recording.spool),
        Stacks: stacks,
    }
    has_trained = trains_in_training_mode(recording, ops) if before is None else before.has_trained
    on_evaluation = notes_on_evaluation(recording, ops, memory.storages, has_trained=has_trained)
    return _Part(tables, memory.notes, has_trained, on_evaluation, op_times)


def _device_notes(device: str, devices: tuple[str, ...]) -> list[str]:
    if len(devices) == 1:
        return []
    others = ", ".join(name for name in devices if name != device)
    return [f"the process used several devices: this is {device}; {others} stand beside it as ranks of their own."]


def optimizer_table(spool: Spool) -> Optimizers:
    """Lists the optimizers; where one has several records, the last one counts."""
    last: dict[int, dict[str, Any]] = {}
    for batch in spool.records.get("optimizers", []):
        last.update({record["number"]: record for record in batch})
    records = [last[number] for number in sorted(last)]
    shapes = [[shape for group in record["groups"] for shape in group["parameters"]] for record in records]
    full = [full_state_bytes(record["algorithm"], record["groups"], record["scalar_bytes"]) for record in records]
    return Optimizers.of(
        optimizer_id=list(range(len(records))),
        name=texts.as_texts([record["name"] for record in records]),
        settings=texts.as_texts([_settings(record) for record in records]),
        parameters=[sum(times for _, _, times in each) for each in shapes],
        parameter_bytes=[sum(times * item * math.prod(sizes) for sizes, item, times in each) for each in shapes],
        elements=[sum(times * math.prod(sizes) for sizes, _, times in each) for each in shapes],
        state_bytes=[record["state_bytes"] for record in records],
        full_state_bytes=[NONE if each is None else each for each in full],
        updates=[record["updates"] for record in records],
    )


def _settings(record: dict[str, Any]) -> str:
    groups = record["groups"]
    return json.dumps(groups[0]["settings"] if groups else {}, sort_keys=True)


#: Bytes of one parameter's state, from its sizes, element bytes, scalar bytes and the group's settings.
Formula = Callable[[tuple[int, ...], int, int, dict[str, Any]], int]


# Bytes of state that each of torch's own optimizers creates in its first update, exact to the byte.
#
# Source: torch/optim/*.py of torch 2.13, the ``_init_group`` of each class: state is created with ``zeros_like`` of the
# parameter (or a copy of its gradient), plus a scalar tensor per parameter (``step``).


def _copies(count: int, scalars: int, *also_if: str) -> Formula:
    """Returns the formula for a number of tensors like the parameter, one more per enabled setting, and scalars."""

    def state_bytes(sizes: tuple[int, ...], item: int, scalar: int, settings: dict[str, Any]) -> int:
        tensors = count + sum(bool(settings.get(name)) for name in also_if)
        # A fused kernel counts its steps in float32, whatever the default type.
        width = 4 if settings.get("fused") else scalar
        return tensors * math.prod(sizes) * item + scalars * width

    return state_bytes


def _adafactor(sizes: tuple[int, ...], item: int, scalar: int, settings: dict[str, Any]) -> int:
    """Returns the state of a factored optimizer: row and column variances of a matrix, the full size otherwise."""
    if len(sizes) < 2:
        return math.prod(sizes) * item + scalar
    rows, columns = math.prod(sizes[:-1]), math.prod((*sizes[:-2], sizes[-1]))
    return (rows + columns) * item + scalar


FORMULAS: dict[str, Formula] = {
    "torch.optim.sgd.SGD": _copies(0, 0, "momentum"),  # momentum_buffer
    "torch.optim.adam.Adam": _copies(2, 1, "amsgrad"),  # exp_avg, exp_avg_sq, max_exp_avg_sq, step
    "torch.optim.adamw.AdamW": _copies(2, 1, "amsgrad"),
    "torch.optim.rmsprop.RMSprop": _copies(1, 1, "momentum", "centered"),  # square_avg, momentum_buffer, grad_avg
    "torch.optim.adagrad.Adagrad": _copies(1, 1),  # sum, created with the optimizer
    "torch.optim.adadelta.Adadelta": _copies(2, 1),  # square_avg, acc_delta
    "torch.optim.nadam.NAdam": _copies(2, 2),  # exp_avg, exp_avg_sq, step, mu_product
    "torch.optim.radam.RAdam": _copies(2, 1),  # exp_avg, exp_avg_sq
    "torch.optim.adamax.Adamax": _copies(2, 1),  # exp_avg, exp_inf
    "torch.optim.asgd.ASGD": _copies(1, 3),  # ax, step, eta, mu
    "torch.optim.rprop.Rprop": _copies(2, 1),  # prev, step_size
    "torch.optim._adafactor.Adafactor": _adafactor,
    "torch.optim._muon.Muon": _copies(1, 0),  # momentum_buffer
    "torch.optim.sparse_adam.SparseAdam": _copies(2, 0),  # exp_avg, exp_avg_sq; step is a Python number
}


def full_state_bytes(algorithm: str, groups: list[dict[str, Any]], scalar_bytes: int) -> int | None:
    """Returns the bytes of an optimizer's state once every parameter has been updated.

    Args:
        algorithm: Class whose ``step`` it runs, with its module.
        groups: Its parameter groups: ``settings``, and ``parameters`` as [sizes, bytes of an element, count].
        scalar_bytes: Bytes of a scalar of torch's default type.

    Returns:
        The bytes; None for an unknown class, or one whose state has no fixed size (LBFGS keeps a history).
    """
    formula = FORMULAS.get(algorithm)
    if formula is None:
        return None
    total = 0
    for group in groups:
        for sizes, item, times in group["parameters"]:
            total += int(times) * formula(tuple(sizes), item, scalar_bytes, group["settings"])
    return total
