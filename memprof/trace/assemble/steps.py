"""Selects the part of a recording to report, and cuts it into steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from memprof.trace.files.spool import Spool
from memprof.trace.schema import NONE, Bools, Ints, Steps

#: Kinds whose operators were recorded.
OBSERVED = ("warm_up", "recorded")


@dataclass(frozen=True)
class Epoch:
    """A stretch of the recording without a gap, in which every allocation was recorded.

    Attributes:
        first_op: Raw number of its first operator.
        end_op: Raw number after its last.
        start_ns: Start time.
        end_ns: Start of the next epoch, or a time after everything.
        source: Source of its memory events: native or dispatch.
    """

    first_op: int
    end_op: int
    start_ns: int
    end_ns: int
    source: str


def choose_epoch(spool: Spool) -> Epoch | None:
    """Returns the epoch with the most recorded steps, on a tie the most begun, then the latest; None without any.

    Recording pauses in skipped steps, between steps on request, and while the job's own profiler runs.
    After a pause the live blocks are listed anew, but storage lifetimes are not joined across the gap.
    """
    end_ns = _window_end_ns(spool)
    epochs = [epoch for epoch in _epochs(spool) if epoch.start_ns <= end_ns]
    steps = spool.records.get("steps", [])

    def weight(epoch: Epoch) -> tuple[int, int, int, int]:
        inside = [step for step in steps if _holds(epoch, step)]
        whole = [step for step in inside if step["is_complete"]]
        begun, recorded = (sum(step["kind"] == "recorded" for step in each) for each in (inside, whole))
        return recorded, begun, len(whole), epoch.first_op

    return max(epochs, key=weight, default=None)


def later_epochs(spool: Spool) -> list[Epoch]:
    """Returns the epochs after the window, up to the end of the last step recorded in each."""
    end_ns = _window_end_ns(spool)
    found = []
    for epoch in _epochs(spool):
        ends = [step["end_op"] for step in spool.records.get("steps", []) if _holds(epoch, step)]
        if epoch.start_ns > end_ns and ends:
            found.append(replace(epoch, end_op=max(ends)))
    return [epoch for epoch in found if epoch.end_op > epoch.first_op]


def _window_end_ns(spool: Spool) -> int:
    """Returns when the window ended; a time after everything if it did not."""
    return min((end["time_ns"] for end in spool.records.get("end", [])), default=np.iinfo(np.int64).max)


def _holds(epoch: Epoch, step: dict[str, Any]) -> bool:
    return bool(epoch.first_op <= step["first_op"] and step["end_op"] <= epoch.end_op and step["kind"] in OBSERVED)


def _epochs(spool: Spool) -> list[Epoch]:
    starts: list[dict[str, Any]] = spool.records.get("epochs", [])
    operators = len(spool.rows["operators"])
    never = np.iinfo(np.int64).max
    pauses: list[dict[str, Any]] = spool.records.get("pauses", [])
    epochs = []
    for start, following in pairwise([*starts, {"op": operators, "time_ns": never}]):
        # The part of a step before a pause belongs to no step: the step starts again after the pause.
        within = (pause for pause in pauses if start["time_ns"] <= pause["time_ns"] < following["time_ns"])
        end = next(within, following)
        epochs.append(Epoch(start["op"], end["op"], start["time_ns"], end["time_ns"], start["source"]))
    return [epoch for epoch in epochs if epoch.end_op > epoch.first_op]


def last_event_ns(spool: Spool, epoch: Epoch) -> int:
    """Returns the time up to which memory events are complete: a killed job loses the last of them."""
    events = spool.columns("events")
    is_mark = (events["address"] == 0) & (events["size_bytes"] == 0)
    moments = events["time_ns"][is_mark & (events["time_ns"] >= epoch.start_ns) & (events["time_ns"] < epoch.end_ns)]
    return int(moments.max(initial=0))


def step_table(spool: Spool, step_of_row: Ints, is_real: Bools) -> Steps:
    """Lists all steps seen, with row ranges for those in the epoch.

    Args:
        spool: The raw recording.
        step_of_row: Step of each operator row.
        is_real: Which rows are operators of the job.
    """
    records: list[dict[str, Any]] = list(spool.records.get("steps", []))
    known = {record["step"] for record in records}
    operators = spool.rows["operators"]
    for step in np.unique(step_of_row):
        if int(step) not in known:  # the job was killed inside it
            rows = np.flatnonzero((step_of_row == step) & is_real)
            begin = max((r["end_ns"] for r in records), default=spool.records["epochs"][0]["time_ns"])
            records.append(
                {
                    "step": int(step),
                    "kind": _kind_of(spool, int(step)),
                    "start_ns": begin,
                    "end_ns": int(operators[-1][1]) if len(rows) else begin,
                    "paused_ns": 0,
                    "updates": 0,
                    "micro_batches": 0,
                    "is_complete": False,
                }
            )
    records.sort(key=lambda record: record["step"])
    first = [_edge(step_of_row, r["step"], "left") for r in records]
    last = [_edge(step_of_row, r["step"], "right") for r in records]
    return Steps.of(
        step=[r["step"] for r in records],
        kind=np.array([r["kind"] for r in records], dtype=np.object_),
        start_us=[r["start_ns"] / 1000 for r in records],
        duration_us=[(r["end_ns"] - r["start_ns"] - r["paused_ns"]) / 1000 for r in records],
        micro_batches=[r["micro_batches"] for r in records],
        optimizer_updates=[r["updates"] for r in records],
        first_op_id=first,
        last_op_id=last,
        is_complete=[r["is_complete"] for r in records],
    )


def _edge(step_of_row: Ints, step: int, side: str) -> int:
    rows = np.flatnonzero(step_of_row == step)
    if not len(rows):
        return NONE
    return int(rows[0] if side == "left" else rows[-1])


def _kind_of(spool: Spool, step: int) -> str:
    window = spool.records["start"][0]["window"]
    return "recorded" if window["skip"] <= step < window["skip"] + window["steps"] else "warm_up"


def number_steps(spool: Spool, epoch: Epoch) -> Ints:
    """Returns the step of each raw operator of an epoch. Shape (operators,).

    What follows the last step belongs to the one that was interrupted, or to the last where the job just ended.
    """
    records = [r for r in spool.records.get("steps", []) if r["kind"] in OBSERVED]
    raw = np.arange(epoch.first_op, epoch.end_op)
    following = max((r["step"] for r in spool.records.get("steps", [])), default=-1) + 1
    is_idle = any(end.get("is_idle") for end in spool.records.get("end", [])) and records
    step = np.full(len(raw), records[-1]["step"] if is_idle else following, dtype=np.int64)
    for record in records:
        step[(raw >= record["first_op"]) & (raw < record["end_op"])] = record["step"]
    return step
