"""The phase of each recorded operator, also of evaluation that runs with gradients enabled."""

from __future__ import annotations

import numpy as np

from memprof.phases import PHASES
from memprof.trace.assemble import texts
from memprof.trace.assemble.recording import Recording
from memprof.trace.files.spool import (
    FLAG_EVAL_MODE,
    FLAG_GRAD_ENABLED,
    FLAG_IN_CLOSURE,
    GRADIENTS_ENABLED,
    NAME_SHIFT,
    Spool,
)
from memprof.trace.fullest import live_during, rows_of_ops
from memprof.trace.schema import NONE, Bools, Ints, Ops, Storages, Texts
from memprof.units import format_bytes

#: Evaluation is mentioned from this share of the highest peak on, and from this size.
_SHARE, _LEAST_BYTES = 0.1, 1 << 20


def phase_names(spool: Spool) -> Texts:
    """Returns the name of each phase code: the built-in phases, then those the job named."""
    return texts.as_texts([*PHASES, *map(str, texts.listed(spool, "phases"))])


def operator_phases(recording: Recording, forward: Ints) -> Texts:
    """Returns the phase of each raw operator.

    Phases named by the job keep their name, except for backward, updates, and the forward that a backward belongs to,
    which policies need. A forward in evaluation mode without a backward is evaluation.

    Args:
        recording: The raw recording.
        forward: The forward operator that each raw backward operator belongs to; NONE elsewhere.
    """
    raw, step = recording.raw, recording.raw_step
    names = phase_names(recording.spool)
    phase = names[raw["phase"]]
    _name_closures(phase, step, (raw["flags"] & FLAG_IN_CLOSURE) != 0)
    _name_inference(phase, step, raw["call"])
    # Operators in evaluation mode, or in a named phase, may be a training forward: backward reads those that are.
    number = raw["flags"] >> NAME_SHIFT
    is_doubtful = (phase == "forward") & ((number > 0) | ((raw["flags"] & FLAG_EVAL_MODE) != 0))
    if is_doubtful.any():
        is_trained = _is_trained(recording, phase, number, forward)
        phase[is_doubtful & ~is_trained] = "evaluation"
    own = np.flatnonzero((number > 0) & ~np.isin(phase, ("forward", "backward", "optimizer")))
    phase[own] = names[len(PHASES) - 1 + number[own]]
    return phase


def _is_trained(recording: Recording, phase: Texts, number: Ints, forward: Ints) -> Bools:
    """Returns which operators run in a training forward. Shape (operators,).

    Decided jointly for all operators of one name, or in evaluation mode, that no backward or update separates.
    Where the backward that follows belongs to none of the operators before it (compiled regions), or the recording ends
    inside a step with gradients on, they are taken to be training.
    """
    step = recording.raw_step
    is_edge = np.isin(phase, ("backward", "optimizer"))
    changes = np.ones(len(step), dtype=np.bool_)
    changes[1:] = (is_edge[1:] != is_edge[:-1]) | (step[1:] != step[:-1])
    stretch = np.cumsum(changes) - 1
    is_read = np.zeros(len(step), dtype=np.bool_)
    is_read[forward[forward != NONE]] = True
    is_read &= ~is_edge
    is_read_stretch = np.zeros(stretch[-1] + 2, dtype=np.bool_)
    is_read_stretch[stretch[is_read]] = True
    is_backward_stretch = np.zeros(stretch[-1] + 2, dtype=np.bool_)
    is_backward_stretch[stretch[phase == "backward"]] = True
    unknown = is_backward_stretch[stretch + 1] & ~is_read_stretch[stretch]
    complete = [one["step"] for one in recording.spool.records.get("steps", []) if one["is_complete"]]
    flags = recording.raw["flags"]
    unknown |= (stretch == stretch[-1]) & ~np.isin(step, complete) & ((flags & FLAG_GRAD_ENABLED) != 0)
    kind = 2 * number + ((flags & FLAG_EVAL_MODE) != 0)
    group = stretch * (int(kind.max()) + 1) + kind
    found: Bools = unknown | np.isin(group, group[is_read])
    return found


def _name_closures(phase: Texts, step: Ints, is_in_closure: Bools) -> None:
    """Labels as forward what a closure runs without gradients, such as logging, if the closure then runs backward.

    Otherwise the closure has ended, and the operators without gradients are the update itself.
    """
    rows, others = np.flatnonzero(is_in_closure), np.flatnonzero(~is_in_closure)
    place = np.searchsorted(others, rows)
    rows, place = rows[place < len(others)], place[place < len(others)]
    following = others[place]
    goes_on = np.isin(phase[following], ("forward", "backward")) & (step[following] == step[rows])
    phase[rows[goes_on]] = "forward"


def _name_inference(phase: Texts, step: Ints, call: Ints) -> None:
    """Labels a step without gradients as forward where a model runs, unless it evaluates a model that is trained."""
    is_beside = np.isin(phase, ("other", "saving", "loading"))
    for number in np.unique(step):
        inside = step == number
        if is_beside[inside].all():
            phase[inside & (phase == "other") & (call >= 0)] = "forward"


def trains_in_training_mode(recording: Recording, ops: Ops) -> bool:
    """Returns whether the job trains in training mode, and not in evaluation mode to freeze running statistics."""
    is_trained = np.isin(ops.phase, ("backward", "optimizer"))
    last = np.flatnonzero(is_trained)[-1:]
    return (
        bool(last.size) and not (_has_flag(recording, FLAG_EVAL_MODE) & (ops.phase == "forward"))[: int(last[0])].any()
    )


def notes_on_evaluation(recording: Recording, ops: Ops, storages: Storages, *, has_trained: bool) -> tuple[str, ...]:
    """Returns a note where evaluation keeps much of the memory for a backward.

    Args:
        recording: The raw recording.
        ops: The operators.
        storages: The storages, with the operators that allocate and free them.
        has_trained: Whether the job trains in training mode only: a forward in evaluation mode then evaluates.
    """
    is_kept = _keeps_graph(recording, ops, has_trained=has_trained)
    if not is_kept.any():
        return ()
    born = rows_of_ops(ops, storages.created_op_id)
    live = live_during(ops, storages)
    own = live_during(ops, storages.take((born != NONE) & is_kept[born]))
    fullest = int(np.argmax(np.where(is_kept, own, -1)))
    if own[fullest] < max(_LEAST_BYTES, _SHARE * live.max()):
        return ()
    told = (
        f"{GRADIENTS_ENABLED}: {format_bytes(int(own[fullest]))} of the "
        f"{format_bytes(int(live[fullest]))} at its fullest are what it has computed, and autograd keeps what a "
        "backward would need of that. Run it under torch.no_grad()."
    )
    return (told,)


def _keeps_graph(recording: Recording, ops: Ops, *, has_trained: bool) -> Bools:
    """Returns which operators evaluate with gradients enabled; shape (ops,).

    A last forward in evaluation mode counts as well, since memory may have run out before its end.
    """
    trained = np.flatnonzero(np.isin(ops.phase, ("backward", "optimizer")))
    is_last = has_trained & (np.arange(len(ops)) > trained.max(initial=-1))
    is_last &= _has_flag(recording, FLAG_EVAL_MODE) & (ops.phase == "forward")
    found: Bools = _has_flag(recording, FLAG_GRAD_ENABLED) & ((ops.phase == "evaluation") | is_last)
    return found


def _has_flag(recording: Recording, flag: int) -> Bools:
    has_flag: Bools = recording.spread((recording.raw["flags"] & flag) != 0, fill=False)
    return has_flag
