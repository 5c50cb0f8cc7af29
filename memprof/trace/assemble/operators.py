"""Builds the operator and module-call tables of a recording, with the device time of each operator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.assemble import links, texts
from memprof.trace.assemble.memory.native_events import CPU
from memprof.trace.assemble.phases import operator_phases
from memprof.trace.assemble.recording import Recording
from memprof.trace.assemble.timeline import first_rows
from memprof.trace.assemble.times import Partners, corrected_durations, find_partners, packet
from memprof.trace.files.spool import (
    FLAG_CALL_HOOKS,
    FLAG_CALL_RECOMPUTE,
    FLAG_COLLECTIVE,
    FLAG_GENERATED,
    FLAG_HOOKED,
    FLAG_IN_REGION,
    FLAG_MUTATES,
    FLAG_RECOMPUTE,
    FLAG_RNG,
    FLAG_VIEW,
    WRITE,
)
from memprof.trace.schema import NONE, Bools, Floats, Ints, ModuleCalls, Modules, Ops, Texts

_BETWEEN_NAME = "allocation between operators"
_COMPILED_NAME = "compiled region"
_COMPILED_TYPE = "OptimizedModule"


@dataclass(frozen=True)
class Calls:
    """Module calls, with their entry and exit times (Unix nanoseconds, shape (calls,))."""

    table: ModuleCalls
    enter_ns: Ints
    exit_ns: Ints


def step_of_rows(recording: Recording) -> Ints:
    """Returns the step of each row. Memory allocated between steps belongs to the earlier one until that step ends."""
    step = recording.raw_step[recording.after]
    earlier = recording.raw_step[recording.before]
    ends = {record["step"]: record["end_ns"] for record in recording.spool.records.get("steps", [])}
    for row in np.flatnonzero(~recording.is_real & (earlier != step)):
        if recording.timeline.start_ns[row] < ends.get(int(earlier[row]), 0):
            step[row] = earlier[row]
    return step


def module_calls(recording: Recording) -> Calls:
    """Builds the table of module calls; calls still open when the recording ended are dropped."""
    calls = recording.in_epoch("calls")
    order = np.argsort(calls["call"], kind="stable")
    first = calls["first_op"][order] - recording.epoch.first_op
    order = order[(first >= 0) & (first <= recording.raw_count)]
    calls = {name: values[order] for name, values in calls.items()}
    first = calls["first_op"] - recording.epoch.first_op
    end = np.minimum(calls["end_op"] - recording.epoch.first_op, recording.raw_count)
    number_of = {call: i for i, call in enumerate(calls["call"].tolist())}
    has_ops = end > first
    last_raw = recording.raw_count - 1
    table = ModuleCalls.of(
        module_call_id=np.arange(len(first)),
        module_id=calls["module"],
        parent_call_id=[number_of.get(parent, NONE) for parent in calls["parent"].tolist()],
        step=recording.raw_step[np.minimum(first, last_raw)],
        first_op_id=np.where(has_ops, recording.row_of_raw[np.minimum(first, last_raw)], NONE),
        last_op_id=np.where(has_ops, recording.row_of_raw[np.clip(end - 1, 0, last_raw)], NONE),
        is_recompute=(calls["flags"] & FLAG_CALL_RECOMPUTE) != 0,
        enters_hooks=(calls["flags"] & FLAG_CALL_HOOKS) != 0,
    )
    return Calls(table, calls["enter_ns"], calls["exit_ns"])


def operator_table(recording: Recording, modules: Modules, calls: Calls, stack_rows: Ints) -> Ops:
    """Builds the operator table, except for durations and workspace.

    Args:
        recording: The raw recording.
        modules: The module table.
        calls: The module calls.
        stack_rows: Row of each raw stack in the stack table, NONE last.
    """
    raw = recording.raw
    flags = raw["flags"]
    is_recompute = (flags & FLAG_RECOMPUTE) != 0
    names = texts.look_up(recording.names, raw["name"]).astype(np.object_)
    forward = links.forward_of(raw["sequence"], raw["node_sequence"], names, (flags & FLAG_MUTATES) != 0)
    # Backward belongs where its forward ran: the same module and line of user code.
    module, stack = raw["module"].copy(), stack_rows[raw["stack"]]
    linked = forward != NONE
    repeats = np.flatnonzero(linked & is_recompute & (module == NONE))
    forward[repeats] = _first_runs(raw, repeats)
    linked &= ~is_recompute | (module == NONE)
    linked &= ((flags & FLAG_IN_REGION) == 0) | (module == NONE)
    module[linked] = _called_modules(recording)[forward[linked]]
    unplaced = (forward != NONE) & (stack == NONE)
    stack[unplaced] = stack[forward[unplaced]]
    phase = operator_phases(recording, forward)
    kind = np.where((flags & FLAG_COLLECTIVE) != 0, "collective", "compute").astype(np.object_)
    module_id = recording.spread(module, NONE)
    name = recording.spread(names, "").astype(np.object_)
    between = ~recording.is_real
    module_id[between], name[between] = _place_between(recording, modules, calls)
    return Ops.of(
        op_id=np.arange(recording.rows),
        step=step_of_rows(recording),
        micro_batch=raw["micro_batch"][recording.before],
        phase=phase[recording.after],
        module_id=module_id,
        name=name,
        kind=recording.spread(kind, "allocation").astype(np.object_),
        start_us=recording.timeline.start_ns / 1000,
        stream=recording.spread(streams_of(recording), 0),
        flops=recording.spread(raw["flops"], 0),
        read_bytes=recording.spread(raw["read_bytes"], 0),
        written_bytes=recording.spread(raw["written_bytes"], 0),
        is_recompute=recording.spread(is_recompute, fill=False),
        forward_op_id=recording.spread(recording.rows_of(forward), NONE),
        stack_id=recording.spread(stack, NONE),
        uses_rng=recording.spread((flags & FLAG_RNG) != 0, fill=False),
        mutates=recording.spread((flags & FLAG_MUTATES) != 0, fill=False),
        is_hooked=recording.spread((flags & FLAG_HOOKED) != 0, fill=False),
    )


def _called_modules(recording: Recording) -> Ints:
    """Returns the module of each operator; of one in compiled code, that of the call that ran the whole region."""
    raw, calls = recording.raw, recording.in_epoch("calls")
    module = raw["module"].copy()
    inside = np.flatnonzero((raw["flags"] & FLAG_IN_REGION) != 0)
    row = first_rows(calls["call"], raw["call"][inside])
    module[inside[row != NONE]] = calls["module"][row[row != NONE]]
    return module


def _first_runs(raw: dict[str, Ints], repeats: Ints) -> Ints:
    """Returns the original run of operators that a policy reran; the original supplies module and stack.

    Autograd's counter does not advance at operators without a node of their own: they are distinguished by name.
    """
    if not len(repeats):
        return repeats
    wanted = set(zip((raw["node_sequence"][repeats] + 1).tolist(), raw["name"][repeats].tolist(), strict=True))
    firsts: dict[tuple[int, int], int] = {}
    for row, key in enumerate(zip(raw["sequence"].tolist(), raw["name"].tolist(), strict=True)):
        if key in wanted:
            firsts.setdefault(key, row)
    keys = zip((raw["node_sequence"][repeats] + 1).tolist(), raw["name"][repeats].tolist(), strict=True)
    found = np.array([firsts.get(key, NONE) for key in keys], dtype=np.int64)
    return np.where(found < repeats, found, NONE)


def partners_by_step(recording: Recording) -> dict[int, Partners]:
    """Matches each recorded step's operators with the timed step; steps that differ from it are dropped."""
    timed = recording.spool.columns("times")
    timed_names = [recording.names[i] for i in timed["name"]]
    packets = [packet(name) for name in recording.names]
    is_generated = (recording.raw["flags"] & FLAG_GENERATED) != 0
    found = {}
    for step in np.unique(recording.raw_step):
        inside = recording.raw_step == step
        is_seen = ~is_generated[inside]
        names = [packets[i] for i in recording.raw["name"][inside][is_seen]]
        is_work = (recording.raw["flags"][inside][is_seen] & FLAG_VIEW) == 0
        is_work &= [not name.startswith("profiler::") for name in names]
        partners = find_partners(names, is_work, timed_names, timed["duration_ns"], timed["depth"])
        if partners is not None:
            found[int(step)] = partners.spread(is_seen)
    return found


def durations(recording: Recording, partners: dict[int, Partners]) -> tuple[Floats, str]:
    """Returns each row's duration without the recorder (microseconds, NaN between operators), and its source."""
    raw = recording.raw
    own_us = np.empty(recording.raw_count)
    row = np.full(recording.raw_count, NONE, dtype=np.int64)
    for step in np.unique(recording.raw_step):
        inside = recording.raw_step == step
        measured = (raw["end_ns"] - raw["start_ns"])[inside]
        own_us[inside] = corrected_durations(measured, (raw["flags"][inside] & FLAG_VIEW) != 0)
        if int(step) in partners:
            row[inside] = partners[int(step)].timed_row
    is_timed = row != NONE
    own_us[is_timed] = recording.spool.columns("times")["duration_ns"][row[is_timed]] / 1000
    source = "recorded step, dispatch cost taken off"
    if partners:
        records = recording.spool.records.get("steps", [])
        timed_steps = [record["step"] for record in records if record["kind"] == "timed"]
        # A job that died inside the timed step left times, but no step record.
        source = f"timed step {timed_steps[0] if timed_steps else int(recording.raw_step.max()) + 1}"
    if recording.memory_events.device != CPU:
        own_us = on_device(recording, own_us, row)
        source = f"{source}, on the device" if has_kernels(recording) else "none: work on the device was not timed"
    return recording.spread(own_us, np.nan), source


def _place_between(recording: Recording, modules: Modules, calls: Calls) -> tuple[Ints, Texts]:
    """Assigns memory allocated between operators to the enclosing module call."""
    moments = recording.timeline.start_ns[~recording.is_real]
    module = np.full(len(moments), NONE, dtype=np.int64)
    name = np.full(len(moments), _BETWEEN_NAME, dtype=np.object_)
    latest = np.searchsorted(calls.enter_ns, moments, side="right") - 1
    for i, (moment, call) in enumerate(zip(moments.tolist(), latest.tolist(), strict=True)):
        here = call
        while here >= 0 and calls.exit_ns[here] < moment:
            here = int(calls.table.parent_call_id[here])
        if here >= 0:
            module[i] = calls.table.module_id[here]
            if modules.type[module[i]] == _COMPILED_TYPE:
                name[i] = _COMPILED_NAME
    return module, name


def has_kernels(recording: Recording) -> bool:
    """Whether device time was measured."""
    return len(recording.spool.rows["kernels"]) > 0


def on_device(recording: Recording, processor_us: Floats, timed_row: Ints) -> Floats:
    """Returns the device time of each raw operator, in microseconds. Shape (raw,).

    Launch overhead on the CPU overlaps with device work and is excluded. Operators on CPU tensors get their
    CPU time.

    Args:
        recording: The raw recording.
        processor_us: CPU time of each operator. Shape (raw,).
        timed_row: The operator's row in the timed step; NONE without one.

    Returns:
        NaN where no device was timed or the operator is missing from the timed step.
    """
    work_us = np.full(recording.raw_count, np.nan)
    if has_kernels(recording):
        kernels, timed = recording.spool.columns("kernels"), recording.spool.columns("times")
        own = np.zeros(len(timed["depth"]), dtype=np.int64)
        np.add.at(own, kernels["row"], kernels["device_ns"])
        is_timed = timed_row != NONE
        work_us[is_timed] = subtree_sums(own, timed["depth"])[timed_row[is_timed]] / 1000
    return np.where(is_on_processor(recording), processor_us, work_us)


def subtree_sums(own: Ints, depth: Ints) -> Ints:
    """Sums a column over each row and its descendants.

    Args:
        own: Values of the rows, parents before children. Shape (rows,).
        depth: Their depths.
    """
    total = np.concatenate(([0], np.cumsum(own)))
    end = np.full(len(depth), len(depth), dtype=np.int64)
    open_rows: list[int] = []
    for row, level in enumerate(depth.tolist()):
        while open_rows and depth[open_rows[-1]] >= level:
            end[open_rows.pop()] = row
        open_rows.append(row)
    sums: Ints = total[end] - total[:-1]
    return sums


def is_on_processor(recording: Recording) -> Bools:
    """Returns which raw operators return only CPU tensors. Shape (raw,)."""
    touches = recording.spool.columns("touches")
    op = touches["op"] - recording.epoch.first_op
    is_made = (op >= 0) & (op < recording.raw_count) & (touches["role"] == WRITE) & (touches["tensor"] != NONE)
    is_here = np.array([device == CPU for device in recording.tensors.device] or [True], dtype=np.bool_)
    makes, makes_elsewhere = (np.zeros(recording.raw_count, dtype=np.bool_) for _ in range(2))
    makes[op[is_made]] = True
    makes_elsewhere[op[is_made][~is_here[touches["tensor"][is_made]]]] = True
    return makes & ~makes_elsewhere


def streams_of(recording: Recording) -> Ints:
    """Returns the stream of each raw operator, numbered by first appearance; 0 is the default stream. Shape (raw,)."""
    changes = recording.spool.columns("streams")
    stream = np.zeros(recording.raw_count, dtype=np.int64)
    if not len(changes["op"]):
        return stream
    numbers = {0: 0}
    for raw in changes["stream"].tolist():
        numbers.setdefault(raw, len(numbers))
    place = np.searchsorted(changes["op"], np.arange(recording.raw_count) + recording.epoch.first_op, side="right") - 1
    known = place >= 0
    of_change = np.array([numbers[raw] for raw in changes["stream"].tolist()], dtype=np.int64)
    stream[known] = of_change[place[known]]
    return stream
