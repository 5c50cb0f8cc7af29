"""Finds evaluation that runs with gradients enabled, for which autograd keeps what no backward will need."""

from __future__ import annotations

import numpy as np

from memprof.trace.assemble.recording import Recording
from memprof.trace.files.spool import FLAG_EVAL_MODE, FLAG_GRAD_ENABLED, GRADIENTS_ENABLED
from memprof.trace.fullest import live_during, rows_of_ops
from memprof.trace.schema import NONE, Bools, Ops, Storages
from memprof.units import format_bytes

#: Evaluation is mentioned from this share of the highest peak on, and from this size.
_SHARE, _LEAST_BYTES = 0.1, 1 << 20


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
    """Returns which operators ran with a flag set; shape (ops,)."""
    has_flag: Bools = recording.spread((recording.raw["flags"] & flag) != 0, fill=False)
    return has_flag
