"""Which operators of a module are worth keeping under checkpoint: those that take longest for the bytes they make."""

from __future__ import annotations

import numpy as np

from memprof.policies.checkpoint.kinds import spell_calls
from memprof.trace.operator_facts import ATTENTION, LIFT, OPERATOR_KINDS
from memprof.trace.schema import Bools, Ints
from memprof.trace.step import Step

#: Number of sets proposed for a module: each has to be replayed.
MOST_SETS = 14

#: Kinds whose outputs are kept by their name, where all operators of the module of that kind are.
_NAMED_KINDS = ("attention", "conv", "matmul")


def kept_sets(step: Step, call: range) -> list[tuple[str, ...]]:
    """Returns values of ``keep`` for the operators of a module, from the fewest bytes kept to the most.

    Each set contains the one before it: operators are added by the time they take for each byte of their outputs, which
    solves the knapsack problem of what to keep up to its last operator (Dantzig 1957). Left out are operators that
    cannot be kept (in-place and random ones), and those that would not run again anyway.
    """
    ops = np.arange(call.start, call.stop)
    ops = ops[may_be_kept(step, ops)]
    sizes = step.born_bytes()[ops]
    times = np.nan_to_num(step.ops.duration_us[ops])
    is_worth_it = (sizes > 0) & (times > 0)
    ops, sizes, times = ops[is_worth_it], sizes[is_worth_it], times[is_worth_it]
    if not len(ops):
        return []
    order = np.argsort(-times / sizes, kind="stable")
    ends = _spread(np.cumsum(times[order]), MOST_SETS)
    sets = (keep_entries(step, call, np.sort(ops[order[: end + 1]])) for end in ends)
    return list(dict.fromkeys(sets))


def may_be_kept(step: Step, ops: Ints) -> Bools:
    """Marks the operators whose outputs may be kept, and that checkpoint would otherwise run again."""
    saved, uses, storages = step.saved, step.uses, step.storages
    inside = (
        saved.forward_op_id[(saved.forward_op_id >= ops[0]) & (saved.forward_op_id <= ops[-1])] if len(ops) else ops
    )
    # The recompute stops at the operator that saves last, before its kernel unless it saves an output.
    last = int(inside.max(initial=-1))
    runs_again = ops < last
    outputs = saved.storage_id[saved.forward_op_id == last]
    runs_again |= (ops == last) & bool(np.any(storages.created_op_id[outputs] == last))

    is_change = (uses.role == "mutate") & (step.ops.phase[uses.op_id] == "forward")
    changed = storages.created_op_id[uses.storage_id[is_change]]
    is_changed_later = np.isin(ops, changed[changed < uses.op_id[is_change]])
    # lift_fresh only returns the tensor that torch.tensor made just before it, which is made again anyway.
    is_made = step.ops.name[ops] != LIFT
    is_random = step.ops.uses_rng[ops] & ~np.isin(step.ops.name[ops], ATTENTION)
    may: Bools = runs_again & is_made & ~step.ops.mutates[ops] & ~is_changed_later & ~is_random
    return may


def _spread(total: np.ndarray[tuple[int], np.dtype[np.float64]], most: int) -> Ints:
    """Chooses up to ``most`` positions of a growing sum, evenly over its values, the first and the last included."""
    if len(total) <= most:
        return np.arange(len(total))
    wanted = np.linspace(total[0], total[-1], most)
    return np.unique(np.searchsorted(total, wanted - 1e-9 * total[-1]))


def keep_entries(step: Step, call: range, kept: Ints) -> tuple[str, ...]:
    """Returns entries of ``keep`` for some operators of a call: kinds, operators, or numbers of their calls."""
    names = step.ops.name[call.start : call.stop]
    is_kept = np.zeros(len(names), dtype=np.bool_)
    is_kept[kept - call.start] = True
    entries: list[str] = []
    for name in dict.fromkeys(names[is_kept].tolist()):
        calls = is_kept[names == name]
        numbers = "" if calls.all() else "#" + spell_calls((np.flatnonzero(calls) + 1).tolist())
        entries.append(f"{name}{numbers}")
    for kind in _NAMED_KINDS:
        of_kind = [name for name in OPERATOR_KINDS[kind] if name in names]
        if of_kind and set(of_kind) <= set(entries):
            entries = [kind, *(entry for entry in entries if entry not in of_kind)]
    return tuple(sorted(entries))
