"""Names the phase of each recorded operator, also where only what comes after it shows which it is."""

from __future__ import annotations

import numpy as np

from memprof.phases import PHASES
from memprof.trace.assemble import texts
from memprof.trace.assemble.recording import Recording
from memprof.trace.files.spool import FLAG_EVAL_MODE, FLAG_GRAD_ENABLED, FLAG_IN_CLOSURE, NAME_SHIFT, Spool
from memprof.trace.schema import NONE, Bools, Ints, Texts


def phase_names(spool: Spool) -> Texts:
    """Returns the name of each phase code: those that every recording has, then the job's own."""
    return texts.as_texts([*PHASES, *map(str, texts.listed(spool, "phases"))])


def operator_phases(recording: Recording, forward: Ints) -> Texts:
    """Returns the phase of each raw operator.

    What the job names keeps the name, but for backward, updates, and the forward that a backward belongs to, which
    policies need as such. A forward in evaluation mode that no backward belongs to is evaluation.

    Args:
        recording: The raw recording.
        forward: The forward operator that each raw operator belongs to as its backward, NONE elsewhere.
    """
    raw, step = recording.raw, recording.raw_step
    names = phase_names(recording.spool)
    phase = names[raw["phase"]]
    _name_closures(phase, step, (raw["flags"] & FLAG_IN_CLOSURE) != 0)
    _name_inference(phase, step, raw["call"])
    # What runs in evaluation mode, or under a name, may be a training forward: those that backward reads are.
    number = raw["flags"] >> NAME_SHIFT
    is_doubtful = (phase == "forward") & ((number > 0) | ((raw["flags"] & FLAG_EVAL_MODE) != 0))
    if is_doubtful.any():
        is_trained = _is_trained(recording, phase, number, forward)
        phase[is_doubtful & ~is_trained] = "evaluation"
    own = np.flatnonzero((number > 0) & ~np.isin(phase, ("forward", "backward", "optimizer")))
    phase[own] = names[len(PHASES) - 1 + number[own]]
    return phase


def _is_trained(recording: Recording, phase: Texts, number: Ints, forward: Ints) -> Bools:
    """Returns which operators run in a forward that is trained. Shape (operators,).

    Decided together for all operators of one name, or in evaluation mode, that no backward and no update separates.
    Where backward follows and belongs to none of what is before it (compiled regions), and where the recording ends
    inside a step with gradients on, nothing shows that it is not.
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
    """Calls forward what a closure runs without gradients, such as logging, where it goes on with backward.

    Otherwise the closure is over, and it is the update itself that runs without gradients.
    """
    rows, others = np.flatnonzero(is_in_closure), np.flatnonzero(~is_in_closure)
    place = np.searchsorted(others, rows)
    rows, place = rows[place < len(others)], place[place < len(others)]
    following = others[place]
    goes_on = np.isin(phase[following], ("forward", "backward")) & (step[following] == step[rows])
    phase[rows[goes_on]] = "forward"


def _name_inference(phase: Texts, step: Ints, call: Ints) -> None:
    """Calls a step without gradients forward where a model runs, if no model that is trained is evaluated in it."""
    is_beside = np.isin(phase, ("other", "saving", "loading"))
    for number in np.unique(step):
        inside = step == number
        if is_beside[inside].all():
            phase[inside & (phase == "other") & (call >= 0)] = "forward"
