"""A schedule: the order in which operators run, some more than once, and its cost.

The order implies the rest. A read uses the latest version of a value; the copy of a recomputed value is dropped after
its last read; a value that is never recomputed is held as long as in the recording. Values offloaded to host memory are
listed separately, as moves.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from memprof.errors import InvariantError
from memprof.planners.graph.graph import Graph
from memprof.planners.graph.moves import Moves, Replay, away_bytes, lives_at, needed_runs, waits_us
from memprof.policies.rewrite.draft import Draft, find_spans
from memprof.policies.rewrite.insertion import SWAP_IN, SWAP_OUT
from memprof.policies.swap.copies import copy_ops
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import Step, rows_of


def as_recorded(graph: Graph) -> Ints:
    """Returns the schedule that runs every operator once, in recorded order."""
    return np.arange(graph.ops)


def replay(graph: Graph, runs: Ints, moves: Moves | None = None) -> Replay:
    """Computes every life in a schedule, and the live bytes at each of its runs.

    Args:
        graph: The step.
        runs: Operators in run order. Each runs at least once, the first time in the order of the step; repeats must be
            repeatable.
        moves: Values offloaded to host memory. Their memory does not count while away; their lives go on.

    Raises:
        InvariantError: Invalid schedule: an operator is missing, out of order, or reads a freed value.
    """
    count = len(runs)
    is_again, first_run = _first_runs(graph, runs)

    # Lives: every run of a value's operator begins one.
    runs_by_op = np.argsort(runs, kind="stable")
    rows, times = rows_of(runs[runs_by_op], graph.value_op)
    life_value = np.repeat(np.arange(graph.values), times)
    life_born = runs_by_op[rows]
    key = life_value * (count + 1) + life_born

    # Reads: every run of an operator reads the latest life of its inputs.
    rows, times = rows_of(graph.read_op, runs)
    read_run = np.repeat(np.arange(count), times)
    read_value = graph.read_value[rows]
    read_life = np.searchsorted(key, read_value * (count + 1) + read_run) - 1

    freed = life_born.copy()
    np.maximum.at(freed, read_life, read_run)
    # Held as in the recording, unless recomputed before.
    recorded = graph.value_freed_op[life_value]
    held = np.where(recorded == NONE, count, first_run[recorded])
    is_same = np.append(life_value[1:] == life_value[:-1], False)[: len(life_value)]
    until = np.where(is_same, np.append(life_born[1:], 0)[: len(life_born)], count + 1)
    freed = np.where((held > freed) & (held < until), held, freed)

    # A life whose memory another reuses ends where that begins.
    source = graph.taken_from[life_value]
    heirs = np.flatnonzero(source != NONE)
    before = np.searchsorted(key, source[heirs] * (count + 1) + life_born[heirs]) - 1
    gone = np.full(len(life_value), count, dtype=np.int64)
    gone[before] = life_born[heirs]
    _check_reads(runs, read_run, gone[read_life], is_taken_once=len(np.unique(before)) == len(before))
    freed[before] = life_born[heirs] - 1

    born_bytes, freed_bytes = np.zeros(count, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    size = graph.value_bytes[life_value]
    np.add.at(born_bytes, life_born, size)
    np.add.at(freed_bytes, freed, size)
    after = np.cumsum(born_bytes - freed_bytes[:count])
    during = after + freed_bytes[:count] + graph.workspace_bytes[runs] + _floor(graph, runs, is_again)
    done = Replay(
        runs=runs,
        is_again=is_again,
        during_bytes=during,
        life_value=life_value,
        life_born=life_born,
        life_freed=freed,
        read_run=read_run,
        read_life=read_life,
        extra_us=float(graph.cost_us[runs[is_again]].sum()),
    )
    if moves is None or not len(moves):
        return done
    needed = needed_runs(done, moves)
    return dataclasses.replace(
        done,
        during_bytes=during - away_bytes(moves, graph.value_bytes, count),
        stall_us=float(waits_us(moves, needed, graph.value_bytes, graph.cost_us[runs]).sum()),
    )


def scheduled_step(step: Step, graph: Graph, runs: Ints, moves: Moves | None = None) -> Step:
    """Rewrites a step into the one under a schedule, so that it can be reported and compared like any other."""
    done = replay(graph, runs, moves)
    draft = Draft(step)
    copies = np.flatnonzero(done.is_again)
    # A repeat comes before the next original operator.
    originals = np.where(done.is_again, len(step.ops), runs)
    before = np.minimum.accumulate(originals[::-1])[::-1][copies]
    op_of_run = runs.copy()
    op_of_run[copies] = draft.repeat_ops(runs[copies], before)
    draft.copy_uses(runs[copies], op_of_run[copies])
    # Empty storages are not values of the graph, so a repeat does not recreate them.
    is_void = (step.storages.allocated_bytes == 0) & (step.storages.created_op_id != NONE)
    draft.uses = draft.uses.take((draft.uses.op_id < len(step.ops)) | ~is_void[draft.uses.storage_id])
    op_of_run = np.append(op_of_run, NONE)

    # Lives that reuse a storage are that storage; a storage's first chain of lives is the recorded one.
    storage = graph.storage_id[done.life_value]
    head = _heads(graph, done)
    end = done.life_freed.copy()
    np.maximum.at(end, head, done.life_freed)
    is_again = done.is_again[done.life_born]
    chain = graph.taken_from[done.life_value] == NONE
    first, again = np.flatnonzero(chain & ~is_again), np.flatnonzero(chain & is_again)
    draft.free(storage[first], op_of_run[end[first]])
    storage_of_head = storage.copy()
    storage_of_head[again] = draft.copy_storages(
        storage[again], op_of_run[done.life_born[again]], op_of_run[end[again]]
    )
    life_storage = storage_of_head[head]

    # A run uses the lives that it reads, and those that it begins.
    life = np.append(done.read_life, np.flatnonzero(is_again))
    op_id = op_of_run[np.append(done.read_run, done.life_born[is_again])]
    draft.redirect_uses(storage[life], life_storage[life], op_id, op_id)
    made_by = np.where(is_again, op_of_run[done.life_born], NONE)
    # What is saved is in the storages that the backward operators read, and repeats save what they make.
    saved = draft.saved
    found = find_spans(saved.storage_id, saved.released_op_id, of=storage[life], first=op_id, last=op_id)
    forward = np.append(made_by[life], NONE)[found]
    draft.saved = saved.replace(
        storage_id=np.where(found != NONE, np.append(life_storage[life], NONE)[found], saved.storage_id),
        forward_op_id=np.where(forward != NONE, forward, saved.forward_op_id),
    )
    draft.duration_us += done.extra_us
    scheduled = draft.build()
    if moves is None or not len(moves):
        return scheduled
    # Its operators are now the runs, its storages in order of birth.
    run_of_op = np.full(len(runs) + 1, NONE)  # the last entry maps NONE
    run_of_op[op_of_run[:-1]] = np.arange(len(runs))
    row = np.argsort(np.argsort(run_of_op[draft.storages.created_op_id], kind="stable"))
    storage_id = row[life_storage[lives_at(done, moves.value, moves.leave_run)]]
    return step_with_moves(scheduled, moves, storage_id, done.stall_us)


def _first_runs(graph: Graph, runs: Ints) -> tuple[Bools, Ints]:
    """Checks the order; returns which runs are repeats, and the first run of each operator."""
    if len(runs) and (runs.min() < 0 or runs.max() >= graph.ops):
        raise InvariantError("the schedule runs an operator that the step does not have.")
    ran, first_run = np.unique(runs, return_index=True)
    if len(ran) != graph.ops:
        raise InvariantError(f"the schedule leaves out {graph.ops - len(ran)} of the step's {graph.ops} operators.")
    if np.any(np.diff(first_run) < 0):
        raise InvariantError("the schedule changes the order in which the step's operators first run.")
    is_again = np.ones(len(runs), dtype=np.bool_)
    is_again[first_run] = False
    wrong = is_again & ~graph.can_repeat[runs]
    if wrong.any():
        raise InvariantError(f"the schedule repeats operator {runs[np.flatnonzero(wrong)[0]]}, which cannot be rerun.")
    return is_again, first_run


def _check_reads(runs: Ints, read_run: Ints, gone_run: Ints, *, is_taken_once: bool) -> None:
    """Rejects a read of a value that was changed in place before it."""
    wrong = np.flatnonzero(read_run > gone_run)
    if len(wrong):
        raise InvariantError(
            f"in the schedule, operator {runs[read_run[wrong[0]]]} reads a value that was changed in place before."
        )
    if not is_taken_once:
        raise InvariantError("the schedule changes a value in place that was changed before; recompute it first.")


def _floor(graph: Graph, runs: Ints, is_again: Bools) -> Ints:
    """Returns the fixed live bytes at each run; for repeats, what the operator before them leaves."""
    originals = np.maximum.accumulate(np.where(is_again, NONE, runs))
    between = np.where(originals == NONE, graph.floor_bytes[0] if graph.ops else 0, graph.floor_after_bytes[originals])
    floor: Ints = np.where(is_again, between, graph.floor_bytes[runs])
    return floor


def _heads(graph: Graph, done: Replay) -> Ints:
    """Returns for each life the head of its chain: the one that allocated the memory."""
    count = len(done.runs)
    key = done.life_value * (count + 1) + done.life_born
    head = np.arange(len(key))
    source = graph.taken_from[done.life_value]
    for life in np.flatnonzero(source != NONE):  # versions come after those whose memory they reuse
        head[life] = head[np.searchsorted(key, source[life] * (count + 1) + done.life_born[life]) - 1]
    return head


def step_with_moves(step: Step, moves: Moves, storage_id: Ints, stall_us: float) -> Step:
    """Rewrites a step so that storages leave and come back.

    Args:
        step: The step of the schedule: operator *i* is run *i*.
        moves: Which values leave, and when.
        storage_id: The storage of each move, shape ``(moves,)``.
        stall_us: Time the step waits for copies.
    """
    draft = Draft(step)
    speed = moves.link_bytes_per_us
    outs = copy_ops(step, moves.leave_run + 1, storage_id, moves.leave_run, SWAP_OUT, speed)
    out_ids = draft.insert_ops(outs, moves.leave_run + 1)
    draft.use(out_ids, storage_id, "read")
    # Copies back at the same run come in list order.
    ins = copy_ops(step, moves.back_run, storage_id, moves.leave_run, SWAP_IN, speed)
    in_ids = draft.insert_ops(ins, moves.back_run)
    draft.split_lives(storage_id, np.where(moves.gone_run == moves.leave_run, out_ids, moves.gone_run), in_ids)
    draft.duration_us += stall_us
    return draft.build()
