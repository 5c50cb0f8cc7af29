"""Measures what options free and cost, for each module, with one replay for each option."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memprof.planners.search.effects import Effects, Option, Windows, choose_moments
from memprof.planners.search.groups import around
from memprof.planners.search.workbench import NEAR, Workbench
from memprof.policies.base import Policy
from memprof.policies.rewrite.insertion import SWAP_IN, SWAP_OUT
from memprof.policies.runtime.model_names import module_names
from memprof.replay.live import live_bytes
from memprof.replay.rounding import rounded_when_pinned
from memprof.trace.schema import NONE, Bools, Floats, Ints
from memprof.trace.step import Step


def measure_effects(
    bench: Workbench, frame: tuple[Policy, ...], options: Sequence[Option], budget_bytes: int = 0
) -> Effects | None:
    """Replays each option for all of its modules at once, and divides the effects among them.

    A storage belongs to the module whose operators make it. What the operators that an option inserts hold at their own
    moments, such as a recompute, belongs to the module they run for.

    Args:
        bench: Replays plans.
        frame: Policies of the whole step, which stay the same.
        options: The options; those that do not apply are left out.
        budget_bytes: The budget: of an option that frees nothing where about as much is live, settings that free less
            are left out.

    Returns:
        The effects; None if no option applies.
    """
    alone = bench.try_plan(*frame)
    if alone is None:
        return None
    base = bench.steps_under(frame)[0]
    live = live_bytes(base).during
    # Plans need more than is live at once: the error of a prediction, and what the allocator reserves beyond it.
    margin = max(bench.needed(bench.counted(alone)) - alone.peak_bytes, NEAR * budget_bytes)
    measured = _replay(bench, frame, options, live, live > budget_bytes - margin)
    if not measured:
        return None
    moments = choose_moments([live, *(one.highest for _, one in measured)])
    names = {name: row for row, name in reversed(list(enumerate(module_names(base))))}
    freed, cost_us, out_us, in_us, host = [], [], [], [], []
    for option, one in measured:
        owner = _owners(base, [names[member] for member in option.members])
        freed.append(_freed(base, live, one, owner, len(option.members), moments))
        more_us = one.step.duration_us - base.duration_us
        time_us = np.nan_to_num(one.step.ops.duration_us)
        cost_us.append(_shares(one.added(time_us, owner, option.sizes)) * more_us)
        out_us.append(one.added(time_us, owner, option.sizes, SWAP_OUT))
        in_us.append(one.added(time_us, owner, option.sizes, SWAP_IN))
        copied = rounded_when_pinned(one.step.ops.read_bytes, base.allocator_settings)
        host.append(one.added(copied, owner, option.sizes, SWAP_OUT))
    sizes = [len(option.members) for option, _ in measured]
    modules = tuple(itertools.chain.from_iterable(option.members for option, _ in measured))
    cost, outs, ins = np.concatenate(cost_us), np.concatenate(out_us), np.concatenate(in_us)
    return Effects(
        frame=frame,
        options=tuple(option for option, _ in measured),
        option_of=np.repeat(np.arange(len(measured)), sizes),
        modules=modules,
        moments=moments,
        live=live[moments],
        freed=np.concatenate(freed, axis=1),
        cost_us=cost,
        copy_us=outs + ins,
        host_bytes=np.concatenate(host),
        windows=_windows(base, modules, names, cost, outs, ins),
    )


def _replay(
    bench: Workbench, frame: tuple[Policy, ...], options: Sequence[Option], live: Ints, is_over: Bools
) -> list[tuple[Option, _Replayed]]:
    """Replays options that apply, each for all of its modules; ``measure_effects`` says which are left out."""
    base = bench.steps_under(frame)[0]
    measured, useless = [], set()
    for option in options:
        if option.family in useless:
            continue
        policies = (*frame, *option.policies)
        if bench.try_plan(*policies) is not None:
            one = _Replayed.of(base, bench.steps_under(policies)[0])
            measured.append((option, one))
            if not (one.highest < live)[is_over].any():
                useless.add(option.family)
        if bench.is_late():
            break
    return measured


def live_at(base: Step, step: Step, moments: Ints) -> Ints | None:
    """Returns the live bytes of a step at operators of the one it was made from, up to the optimizer's update.

    Args:
        base: The step before.
        step: The step under policies that insert operators, or replace those of the update.
        moments: Operators of ``base``.

    Returns:
        For each, the highest live bytes from the operator before it on; 0 in the update. None if the step does not run
        all operators before the update, in order.
    """
    wanted = np.flatnonzero(base.ops.phase != "optimizer")
    found = np.flatnonzero(_matching(base, wanted, step))
    if len(found) < len(wanted):
        return None
    highest = np.zeros(len(base.ops), dtype=np.int64)
    if len(found):
        during = live_bytes(step).during[: found[-1] + 1]
        highest[wanted] = np.maximum.reduceat(during, np.append(0, found[:-1] + 1))
    return highest[moments]


def _matching(base: Step, wanted: Ints, step: Step) -> Bools:
    """Marks the operators of a step that are some of those of the step it was made from: the first ones in order."""
    keys, others = (
        list(zip(one.ops.name, one.ops.module_id, one.ops.phase, one.ops.is_recompute, strict=True))
        for one in (base, step)
    )
    is_match = np.zeros(len(step.ops), dtype=np.bool_)
    rows = wanted.tolist()
    count = 0
    for place, key in enumerate(others):
        if count < len(rows) and key == keys[rows[count]]:
            is_match[place] = True
            count += 1
    return is_match


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

    def added(self, values: Floats | Ints, owner: Ints, sizes: Ints, *names: str) -> Floats:
        """Adds up values of the inserted operators of each member, and returns the mean over those of the same sizes.

        Recorded times of the same operator differ from call to call, and the shortest is no reason to choose a module.

        Args:
            values: Of each operator of the step under the policy, such as its time.
            owner: Place of the member around each module.
            sizes: Number of the members' sizes, shape ``(members,)``.
            names: Names of the operators that count; all if there are none.
        """
        is_counted = self.is_inserted & np.isin(self.step.ops.name, names) if names else self.is_inserted
        whose = _of_ops(owner, self.step)[is_counted]
        total = np.zeros(len(sizes))
        np.add.at(total, whose[whose != NONE], values[is_counted][whose != NONE])
        mean: Floats = np.bincount(sizes, weights=total) / np.maximum(np.bincount(sizes), 1)
        return mean[sizes]


def _inserted(base: Step, step: Step) -> Bools:
    """Marks the operators of a step that are not in the step it was made from."""
    added = len(step.ops) - len(base.ops)
    is_new = step.ops.is_recompute | np.isin(step.ops.name, (SWAP_IN, SWAP_OUT))
    if np.count_nonzero(is_new) == added:
        return is_new
    # The step recomputed or moved something before.
    return ~_matching(base, np.arange(len(base.ops)), step)


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


def _windows(
    base: Step, modules: Sequence[str], names: Mapping[str, int], cost_us: Floats, out_us: Floats, in_us: Floats
) -> Windows:
    """Returns the windows in which copies run.

    Args:
        base: The step without options.
        modules: Module of each column.
        names: Rows of modules by name.
        cost_us: Time each column adds to the step.
        out_us: Time each column copies out, in forward.
        in_us: Time each column copies in, in backward.
    """
    known = set(modules)
    outer = [min(around(name) & known, key=len) for name in modules]
    distinct = list(dict.fromkeys(outer))
    owner = _of_ops(_owners(base, [names[name] for name in distinct]), base)
    time_us = np.nan_to_num(base.ops.duration_us)
    scale = max(1.0, base.duration_us / max(float(time_us.sum()), 1.0))  # Python's time between operators
    room = np.zeros((2, len(distinct)))
    work = np.zeros((2, len(distinct), len(modules)))
    row = np.array([distinct.index(name) for name in outer])
    columns = np.arange(len(modules))
    for place, (phase, copies_us) in enumerate((("forward", out_us), ("backward", in_us))):
        of_phase = np.flatnonzero((base.ops.phase == phase) & (owner != NONE))
        np.add.at(room[place], owner[of_phase], time_us[of_phase] * scale)
        # Waits are measured over both directions, and are beside those of other columns in either.
        share = np.divide(copies_us, out_us + in_us, out=np.zeros(len(modules)), where=out_us + in_us > 0)
        recomputes = (out_us + in_us == 0) & (phase == "backward")
        work[place, row, columns] = copies_us - np.where(recomputes, 1.0, share) * np.maximum(cost_us, 0.0)
    return Windows(work.reshape(-1, len(modules)), room.reshape(-1))


def _shares(work: Floats) -> Floats:
    total = float(work.sum())
    return work / total if total else np.full(len(work), 1.0 / len(work))
