"""Builds the table of failed memory requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from memprof.phases import PHASES
from memprof.trace.assemble import texts
from memprof.trace.assemble.recording import Recording
from memprof.trace.files.spool import Spool
from memprof.trace.schema import MOST_REQUESTED_BYTES, NONE, Ints, Ops, OutOfMemory, Stacks, Storages

_SIZES = (
    "requested_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "largest_free_bytes",
    "free_bytes",
    "total_bytes",
)


def failure_records(spool: Spool) -> list[dict[str, Any]]:
    """Returns the raw records of failed requests."""
    return list(spool.records.get("out_of_memory", []))


def failure_table(
    recording: Recording, ops: Ops, stacks: Stacks, exit_record: Mapping[str, Any] | None
) -> tuple[OutOfMemory, Stacks]:
    """Builds the table, and adds the stacks of requests outside recorded operators.

    A request made by an operator gets that operator's id: the operator is recorded although it failed.

    Args:
        recording: The raw recording.
        ops: The operator table.
        stacks: The stacks of the operators.
        exit_record: The exit record that the parent wrote when the job ended; None while it runs.
    """
    records = failure_records(recording.spool)
    frames = [str(text) for text in stacks.frames]
    rows = [_row(recording, ops, record, frames) for record in records]
    is_caught = [not is_fatal(recording.spool, number, recording.names, exit_record) for number in range(len(records))]
    sizes = {name: [_size(record[name]) for record in records] for name in _SIZES}
    counted = _counted(recording, [record["time_ns"] for record in records])
    sizes["allocated_bytes"] = [
        known if known != NONE or record["device"] != "cpu" or record["op"] < 0 else count
        for known, count, record in zip(sizes["allocated_bytes"], counted, records, strict=True)
    ]
    table = OutOfMemory.of(
        time_us=[record["time_ns"] / 1000 for record in records],
        device=texts.as_texts([record["device"] for record in records]),
        step=[row["step"] for row in rows],
        op_id=[row["op_id"] for row in rows],
        name=texts.as_texts([row["name"] for row in rows]),
        phase=texts.as_texts([row["phase"] for row in rows]),
        module_id=[row["module_id"] for row in rows],
        stack_id=[row["stack_id"] for row in rows],
        **sizes,
        is_caught=is_caught,
        message=texts.as_texts([record["message"] for record in records]),
    )
    return table, Stacks.of(stack_id=np.arange(len(frames)), frames=texts.as_texts(frames))


def _size(found: int | None) -> int:
    """Returns a size as its column holds it; scripts probe memory with requests beyond what any column may sum to."""
    return NONE if found is None else min(found, MOST_REQUESTED_BYTES)


def kept_for_backward(storages: Storages, failures: OutOfMemory, ops: Ops) -> Storages:
    """Labels as activation what forward had created when memory ran out, and backward had not yet reached.

    What backward reads is known only once backward runs; where it never ran or stopped halfway, live forward storages
    are assumed to be saved for it.
    """
    category = storages.category.copy()
    made_in_forward = np.append((ops.phase == "forward") & ~ops.is_recompute, False)[storages.created_op_id]
    for op_id in failures.op_id[failures.op_id != NONE].tolist():
        is_alive = (storages.created_op_id < op_id) & ((storages.freed_op_id == NONE) | (storages.freed_op_id >= op_id))
        same_step = np.append(ops.step, NONE)[storages.created_op_id] == ops.step[op_id]
        category[made_in_forward & is_alive & same_step & (category == "temporary")] = "activation"
    return storages.replace(category=category)


def is_fatal(spool: Spool, number: int, names: Sequence[str], exit_record: Mapping[str, Any] | None) -> bool:
    """Returns whether a failed request ended the job.

    Python's traceback shows it where one was printed. A job that shuts down on its own terms (its own handler, or a
    launcher that reports for it) ended by its last failure if it ran no operator since and exited with an error.

    Args:
        spool: The raw recording.
        number: Number of the failure.
        names: The recording's names.
        exit_record: The exit record that the parent wrote when the job ended; None while it runs.
    """
    if spool.records.get("fatal"):
        return number in spool.records["fatal"]
    records = failure_records(spool)
    ended_badly = exit_record is not None and exit_record.get("returncode", 0) != 0
    if not ended_badly or number != len(records) - 1:
        return False
    since = spool.columns("operators")["name"][records[number]["op"] + 1 :]
    # An optimizer's step closes its profiler range whether or not it failed.
    return all(names[name].startswith("profiler.") for name in since.tolist())


def _row(recording: Recording, ops: Ops, record: dict[str, Any], frames: list[str]) -> dict[str, Any]:
    """Returns a failure's columns from the operator that made the request, or from the traceback without one."""
    raw = record["op"] - recording.epoch.first_op
    is_in_trace = 0 <= raw < recording.raw_count
    op_id = int(recording.row_of_raw[raw]) if is_in_trace else NONE
    if record["is_operator"]:
        if not is_in_trace:
            return _of_raw(recording, record["op"])
        columns = {name: getattr(ops, name)[op_id] for name in ("step", "name", "phase", "module_id", "stack_id")}
        return {**columns, "op_id": op_id}
    stack = "\n".join(record["frames"])
    if stack and stack not in frames:
        frames.append(stack)
    return {
        "step": record["step"],
        "op_id": op_id,
        "name": "",
        "phase": PHASES[record["phase"]] if record["phase"] >= 0 else "",
        "module_id": record["module"],
        "stack_id": frames.index(stack) if stack else NONE,
    }


def _of_raw(recording: Recording, op: int) -> dict[str, Any]:
    """Returns the same for an operator in a part of the recording that is not in the trace."""
    raw = {name: int(values[op]) for name, values in recording.spool.columns("operators").items()}
    return {
        "step": NONE,
        "op_id": NONE,
        "name": recording.names[raw["name"]],
        "phase": PHASES[raw["phase"]],
        "module_id": raw["module"],
        "stack_id": NONE,
    }


def _counted(recording: Recording, times_ns: list[int]) -> list[int]:
    """Returns the CPU allocator's own count at each time; NONE where it reported none."""
    totals: Ints = recording.memory_events.total
    places = recording.timeline.position(np.array(times_ns, dtype=np.int64)) - 1
    return [int(totals[place]) if place >= 0 and totals[place] >= 0 else NONE for place in places.tolist()]
