"""Copies between device and host or disk as operators of a step, and what is in memory between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.rewrite.draft import Draft
from memprof.policies.rewrite.insertion import SWAP_IN, SWAP_OUT, new_ops
from memprof.policies.swap.policy import DEFAULT_GBPS
from memprof.policies.swap.records import Records
from memprof.trace.schema import NONE, Bools, Floats, Ints, Ops
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.swap.policy import Swap

#: Streams of the copies; training runs on stream 0.
STREAM_OUT, STREAM_IN = 1, 2
#: Overhead on the training thread, without waits for copies: per saved tensor that the hooks see, and per storage
#: moved out and back (views, queue, waking the thread, processor cache misses). Fitted to the fastest of 15 to 25
#: steps of the six jobs of tests/policies, on two cores of a virtual machine with torch 2.13.
HOOK_US, PACK_US, UNPACK_US = 15.0, 80.0, 120.0
#: The same for optimizer state and parameters, which are moved without views.
SEND_US, FETCH_US = 25.0, 70.0
#: Processor time to launch an operator from Python and torch when a device computes; not measured: eager PyTorch
#: typically takes 5 to 10.
LAUNCH_US = 8.0


def copy_ops(step: Step, moments: Ints, storages: Ints, like: Ints, name: str, bytes_per_us: float) -> Ops:
    """Creates one copy per storage.

    Args:
        step: The step.
        moments: The operator before which each copy starts.
        storages: Storages to copy.
        like: The operator whose module each copy belongs to.
        name: ``memprof.swap_out`` or ``memprof.swap_in``, which determines the stream.
        bytes_per_us: Speed of the copies.
    """
    size = step.storages.requested_bytes[storages]
    return new_ops(
        step,
        name,
        moments,
        kind="copy",
        module_id=step.ops.module_id[like],
        duration_us=size / bytes_per_us,
        stream=np.full(len(moments), STREAM_OUT if name.endswith("out") else STREAM_IN),
        read_bytes=size,
        written_bytes=size,
    )


def copy_stalls_us(step: Step, records: Records, let_go: Ints, back: Ints, is_moved: Bools, policy: Swap) -> float:
    """Returns how much longer a step takes: the hooks' overhead, and the waits for unfinished copies.

    Copies run in sequence, concurrent with the computation: on disk in one queue for both directions, since one thread
    does both; between a CUDA device and the host in one queue each. There the hooks' overhead runs on the processor,
    concurrent with both.
    """
    clock = _clock_us(step)
    link = link_of(step, policy)
    sizes = step.storages.requested_bytes[records.storage]
    out_us, in_us = sizes / link.out_bytes_per_us, sizes / link.in_bytes_per_us
    is_beside = policy.to == "host"
    pack_us, unpack_us = (0.0, 0.0) if is_beside else (PACK_US, UNPACK_US)
    free = [0.0, 0.0]
    queue_in = 0 if policy.to == "disk" else 1
    done_out, done_in = np.zeros(len(records)), np.zeros(len(records))
    count = len(records)
    number = np.arange(count)
    moved = number[is_moved]
    # Order of events at one moment: wait for copies out, pack, fetch, use.
    moments = np.concatenate([let_go, records.packed, back[moved], records.unpacked[moved]])
    kinds = np.repeat([0, 1, 2, 3], [count, count, len(moved), len(moved)])
    rows = np.concatenate([number, number, moved, moved])
    sign = np.where(kinds >= 2, -rows, rows)
    late = 0.0 if is_beside else HOOK_US * records.hooked
    for at in np.lexsort((sign, kinds, moments)).tolist():
        kind, row = int(kinds[at]), int(rows[at])
        now = float(clock[moments[at]]) + late
        if kind == 0:
            late += max(0.0, float(done_out[row]) - now)
        elif kind == 1:
            late += pack_us
            free[0] = max(free[0], now + pack_us) + float(out_us[row])
            done_out[row] = free[0]
        elif kind == 2:
            free[queue_in] = max(free[queue_in], now) + float(in_us[row])
            done_in[row] = free[queue_in]
        else:
            late += unpack_us + max(0.0, float(done_in[row]) - now)
    if not is_beside:
        return late
    work_us = HOOK_US * records.hooked + PACK_US * count + UNPACK_US * len(moved)
    return longer_us(step, policy, work_us, late)


def _clock_us(step: Step) -> Floats:
    """Returns when each operator starts, from the start of the unmodified step, and when the last one ends."""
    duration = np.nan_to_num(step.ops.duration_us)
    total = float(duration.sum())
    # Python's time between operators is distributed over them.
    scale = max(step.duration_us / total, 1.0) if total > 0 else 1.0
    return np.concatenate([[0.0], np.cumsum(duration * scale)])


@dataclass(frozen=True)
class Link:
    """Bytes per microsecond, out and back."""

    out_bytes_per_us: float
    in_bytes_per_us: float


def link_of(step: Step, policy: Swap) -> Link:
    """Returns the speeds set by the policy, else those measured on the recording machine, else typical ones."""
    if policy.gbps:
        return Link(policy.gbps * 1e3, policy.gbps * 1e3)
    usual = DEFAULT_GBPS[policy.to] * 1e3
    if policy.to == "disk":
        return Link(usual, usual)
    return Link(step.to_host_bytes_per_us or usual, step.from_host_bytes_per_us or usual)


def longer_us(step: Step, policy: Swap, work_us: float, waits_us: float) -> float:
    """Returns how much longer a step takes.

    The processor's own work counts in full if it also computes. If a device computes, it counts only where the
    processor finishes after the device.

    Args:
        step: The original step.
        policy: The settings.
        work_us: Processor time for packing, queueing and views.
        waits_us: Time the computation waits for copies.
    """
    if policy.to == "disk":
        return work_us + waits_us
    processor_us = len(step.ops) * LAUNCH_US + work_us
    return waits_us + max(0.0, processor_us - max(step.duration_us, len(step.ops) * LAUNCH_US) - waits_us)


def can_move(step: Step, policy: Swap, category: str) -> Bools:
    """Returns which storages of a category are in memory all through the step and large enough, ``(storages,)``."""
    storages = step.storages
    is_there = (storages.created_op_id == NONE) & (storages.freed_op_id == NONE)
    is_large = storages.requested_bytes >= max(policy.minimum_bytes, 1)
    is_movable: Bools = (storages.category == category) & is_there & is_large
    return is_movable


def with_stays(
    step: Step,
    policy: Swap,
    at: Ints,
    start: Ints,
    end: Ints,
    is_changed: Bools,
    *,
    moved: Ints | None = None,
) -> Step:
    """Replaces storages that were always in memory by intervals (stays).

    Args:
        step: The step.
        policy: The settings.
        at: The storage of each stay.
        start: The operator before which it begins.
        end: The operator after which it ends.
        is_changed: Whether it is copied out at its end; otherwise the outside copy is still valid.
        moved: All storages that are out otherwise, those of ``at`` by default.
    """
    draft = Draft(step)
    like = np.minimum(start, len(step.ops) - 1)
    link = link_of(step, policy)
    ins = copy_ops(step, start, at, like, SWAP_IN, link.in_bytes_per_us)
    in_ids = draft.insert_ops(ins, start)
    changed = np.flatnonzero(is_changed)
    outs = copy_ops(step, end[changed] + 1, at[changed], end[changed], SWAP_OUT, link.out_bytes_per_us)
    out_ids = draft.insert_ops(outs, end[changed] + 1)
    last = end.copy()
    last[changed] = out_ids
    stays = draft.copy_storages(at, in_ids, last)
    draft.redirect_uses(at, stays, in_ids, last)
    draft.use(in_ids, stays, "write")
    draft.use(out_ids, stays[changed], "read")
    moved = np.unique(at) if moved is None else moved
    draft.remove_storages(moved)
    # Training waits for every copy: the first copy back overlaps with nothing, and changes must be out to be freed.
    copies_us = float(ins.duration_us.sum() + outs.duration_us.sum())
    draft.duration_us += longer_us(step, policy, FETCH_US * len(ins) + SEND_US * len(outs), copies_us)
    return draft.build()


def update_of(step: Step, storages: Ints) -> tuple[Ints, Ints]:
    """Returns the first and the last operator of the update that uses each storage, by default of the first update."""
    is_update = step.ops.phase == "optimizer"
    edges = np.diff(np.concatenate([[False], is_update, [False]]).astype(np.int64))
    first, last = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1
    if not len(first):
        raise PolicyError("the step has no optimizer update, so it does not show when state and parameters are used.")
    uses = step.uses
    inside = is_update[uses.op_id]
    used = np.full(len(step.storages), NONE, dtype=np.int64)
    used[uses.storage_id[inside][::-1]] = uses.op_id[inside][::-1]
    number = np.maximum(np.searchsorted(first, used[storages], side="right") - 1, 0)
    return first[number], last[number]


def joined(*stays: tuple[Ints, Ints, Ints]) -> tuple[Ints, Ints, Ints]:
    """Returns stays of several kinds, each a storage, a start and an end; those of one storage that overlap are one."""
    at, start, end = (np.concatenate(columns) for columns in zip(*stays, strict=True))
    order = np.lexsort((start, at))
    at, start, end = at[order], start[order], end[order]
    rows: list[int] = []
    for row in range(len(at)):
        if rows and at[rows[-1]] == at[row] and start[row] <= end[rows[-1]]:
            end[rows[-1]] = max(end[rows[-1]], end[row])
        else:
            rows.append(row)
    return at[rows], start[rows], end[rows]
