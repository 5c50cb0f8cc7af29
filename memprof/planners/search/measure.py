"""Measures what options free and cost, for each module, with one replay for each option."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memprof.planners.search.effects import Effects, Option
from memprof.planners.search.workbench import Workbench
from memprof.policies.base import Policy
from memprof.policies.rewrite.new_ops import SWAP_IN, SWAP_OUT
from memprof.policies.runtime.model_names import module_names
from memprof.replay.live import live_bytes
from memprof.trace.schema import NONE, Bools, Floats, Ints
from memprof.trace.step import Step

#: Moments at which bytes are compared, at most; of longer steps, the highest of each section.
_MOST_MOMENTS = 2048


def measure_effects(bench: Workbench, frame: tuple[Policy, ...], options: Sequence[Option]) -> Effects | None:
    """Replays each option for all of its modules at once, and divides the effects among them.

    A storage belongs to the module whose operators make it. What the operators that an option inserts hold at their own
    moments, such as a recompute, belongs to the module they run for.

    Args:
        bench: Replays plans.
        frame: Policies of the whole step, which stay the same.
        options: The options; those that do not apply are left out.

    Returns:
        The effects; None if no option applies.
    """
    base = bench.steps_under(frame)[0]
    measured = []
    for option in options:
        policies = (*frame, option.make(option.group.pattern_for(option.members)))
        if bench.try_plan(*policies) is not None:
            measured.append((option, _Replayed.of(base, bench.steps_under(policies)[0])))
        if bench.is_late():
            break
    if not measured:
        return None
    live = live_bytes(base).during
    moments = _moments([live, *(one.highest for _, one in measured)])
    names = {name: row for row, name in reversed(list(enumerate(module_names(base))))}
    freed, cost_us, copy_us = [], [], []
    for option, one in measured:
        owner = _owners(base, [names[member] for member in option.members])
        freed.append(_freed(base, live, one, owner, len(option.members), moments))
        work_us = one.work(owner, len(option.members))
        cost_us.append(_shares(work_us) * (one.step.duration_us - base.duration_us))
        copy_us.append(work_us * one.is_copy)
    sizes = [len(option.members) for option, _ in measured]
    return Effects(
        options=tuple(option for option, _ in measured),
        option_of=np.repeat(np.arange(len(measured)), sizes),
        modules=tuple(itertools.chain.from_iterable(option.members for option, _ in measured)),
        live=live[moments],
        freed=np.concatenate(freed, axis=1),
        cost_us=np.concatenate(cost_us),
        copy_us=np.concatenate(copy_us),
    )


@dataclass(frozen=True, eq=False)
class _Replayed:
    """A step under a policy that inserts operators, in terms of the step before.

    Attributes:
        step: The step under the policy.
        is_inserted: Whether each of its operators is inserted.
        place: The operator of the step before that each is, or that follows it; the last one at the end.
        highest: Live bytes under the policy: the highest from the operators inserted before each operator of the step
            before up to that one itself.
    """

    step: Step
    is_inserted: Bools
    place: Ints
    highest: Ints

    @classmethod
    def of(cls, base: Step, step: Step) -> _Replayed:
        is_inserted = _inserted(base, step)
        before: Ints = np.cumsum(~is_inserted) - ~is_inserted
        place: Ints = np.minimum(before, len(base.ops) - 1)
        highest = np.zeros(len(base.ops), dtype=np.int64)
        np.maximum.at(highest, place, live_bytes(step).during)
        return cls(step, is_inserted, place, highest)

    @property
    def is_copy(self) -> bool:
        """Whether the inserted operators are copies."""
        return bool(np.isin(self.step.ops.name[self.is_inserted], (SWAP_IN, SWAP_OUT)).any())

    def work(self, owner: Ints, members: int) -> Floats:
        """Returns the time of the inserted operators of each member, shape ``(members,)``."""
        whose = _of_ops(owner, self.step)[self.is_inserted]
        time_us = np.nan_to_num(self.step.ops.duration_us[self.is_inserted]) + 1.0
        work = np.zeros(members)
        np.add.at(work, whose[whose != NONE], time_us[whose != NONE])
        return work


def _inserted(base: Step, step: Step) -> Bools:
    """Marks the operators of a step that are not in the step it was made from."""
    added = len(step.ops) - len(base.ops)
    is_new = step.ops.is_recompute | np.isin(step.ops.name, (SWAP_IN, SWAP_OUT))
    if np.count_nonzero(is_new) == added:
        return is_new
    # The step recomputed or moved something before: align the two, operator by operator.
    is_new = np.ones(len(step.ops), dtype=np.bool_)
    row = 0
    keys = [tuple(zip(one.ops.name, one.ops.module_id, one.ops.is_recompute, strict=True)) for one in (base, step)]
    for place, key in enumerate(keys[1]):
        if row < len(keys[0]) and key == keys[0][row]:
            is_new[place] = False
            row += 1
    return is_new


def _owners(step: Step, members: Sequence[int]) -> Ints:
    """Returns the place in ``members`` of the module around each module of a step, NONE outside; ``(modules,)``."""
    parents = step.modules.parent_id
    owner = np.full(len(parents), NONE, dtype=np.int64)
    owner[list(members)] = np.arange(len(members))
    around = parents.copy()
    while np.any(around != NONE):
        inside = np.flatnonzero((owner == NONE) & (around != NONE))
        owner[inside] = owner[around[inside]]
        around = np.where(around != NONE, parents[around], NONE)
    return owner


def _of_ops(owner: Ints, step: Step) -> Ints:
    """Returns the owner of each operator of a step, NONE outside."""
    owners: Ints = np.append(owner, NONE)[step.ops.module_id]
    return owners


def _freed(base: Step, live: Ints, one: _Replayed, owner: Ints, members: int, moments: Ints) -> Floats:
    """Returns the bytes that an option frees for each member at each moment, shape ``(moments, members)``."""
    rows = np.arange(len(base.ops))
    own = _owned(base, rows, np.zeros(len(base.ops), dtype=np.bool_), owner, members, moments)
    own -= _owned(one.step, one.place, one.is_inserted, owner, members, moments)
    rest = (live - one.highest)[moments] - own[:, :members].sum(axis=1)
    # Where operators are inserted, the rest is theirs; elsewhere it is what no member owns.
    whose = _of_ops(owner, one.step)
    at = np.flatnonzero(one.is_inserted & (whose != NONE))
    inserted = np.zeros((len(base.ops), members))
    np.add.at(inserted, (one.place[at], whose[at]), 1.0)
    inserted = inserted[moments]
    total = inserted.sum(axis=1, keepdims=True)
    share = np.where(total > 0, inserted / np.maximum(total, 1.0), 1.0 / members)
    freed: Floats = own[:, :members] + rest[:, None] * share
    return freed


def _owned(step: Step, place: Ints, is_inserted: Bools, owner: Ints, members: int, moments: Ints) -> Floats:
    """Returns the live bytes of the storages each member makes, ``(moments, members + 1)``; the last of no member.

    Args:
        step: The step.
        place: Place of each of its operators in the step before.
        is_inserted: Which operators are inserted before that place.
        owner: Member around each module.
        members: Number of members.
        moments: Places in the step before.
    """
    storages = step.storages
    is_made = np.flatnonzero(storages.created_op_id != NONE)
    created, freed = storages.created_op_id[is_made], storages.freed_op_id[is_made]
    whose = _of_ops(owner, step)[created]
    whose = np.where(whose == NONE, members, whose)
    begin = np.searchsorted(moments, place[created])
    last = np.where(freed == NONE, len(step.ops), place[freed] - is_inserted[freed])
    end = np.searchsorted(moments, last, side="right")
    change = np.zeros((len(moments) + 1, members + 1))
    alive = end > begin
    sizes = storages.allocated_bytes[is_made][alive].astype(np.float64)
    np.add.at(change, (begin[alive], whose[alive]), sizes)
    np.add.at(change, (end[alive], whose[alive]), -sizes)
    bytes_: Floats = np.cumsum(change, axis=0)[:-1]
    return bytes_


def _moments(curves: Sequence[Ints]) -> Ints:
    """Returns the operators at which curves are compared: all, or of many the highest of each section in any curve."""
    count = len(curves[0])
    if count <= _MOST_MOMENTS:
        return np.arange(count)
    edges = np.linspace(0, count, _MOST_MOMENTS // 4 + 1).astype(np.int64)
    chosen: set[int] = set()
    for first, last in itertools.pairwise(edges.tolist()):
        highest = [first + int(np.argmax(curve[first:last])) for curve in curves]
        values, times = np.unique(highest, return_counts=True)
        chosen.update({highest[0], *values[np.argsort(-times, kind="stable")[:3]].tolist()})
    return np.array(sorted(chosen), dtype=np.int64)


def _shares(work: Floats) -> Floats:
    """Returns each member's share of some work; equal shares where there is none."""
    total = float(work.sum())
    return work / total if total else np.full(len(work), 1.0 / len(work))
