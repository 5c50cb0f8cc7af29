"""From a schedule of operators to modules that policies can be applied to, or to saved tensors that remat drops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memprof.planners.base import ScheduleResult
from memprof.planners.graph.graph import Graph
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.groups import Group, are_apart
from memprof.planners.search.workbench import Workbench
from memprof.policies.base import Policy
from memprof.policies.checkpoint.kept_sets import keep_entries, may_be_kept
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.evict.planned import keys_of
from memprof.policies.remat.policy import Remat
from memprof.policies.runtime.model_names import module_names
from memprof.policies.swap.policy import Swap
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import Step

#: A module is chosen if the schedule treats at least this share of its saved bytes that way.
_CHOSEN_SHARE = 0.5


@dataclass(frozen=True)
class _Choice:
    """A module, and what to do with its saved tensors.

    Attributes:
        name: Its qualified name.
        is_moved: Whether to offload them rather than recompute them.
        share: Share of its bytes that the schedule treats that way.
    """

    name: str
    is_moved: bool
    share: float

    def is_apart_from(self, others: Sequence[_Choice]) -> bool:
        """Returns whether it is none of some modules, and neither inside nor around one."""
        return are_apart([self.name], [other.name for other in others])


def project(
    bench: Workbench, graph: Graph, found: ScheduleResult, groups: Sequence[Group], budget_bytes: int
) -> Candidate | None:
    """Chooses modules that follow a schedule, and the calls of operators that they keep, and replays the result.

    Args:
        bench: Replays plans.
        graph: The step's graph.
        found: The schedule.
        groups: The candidate modules.
        budget_bytes: Most bytes that may be allocated at once.

    Returns:
        The fastest choice within the budget; None for none.
    """
    if found.runs is None:
        return None
    plans = [_whole_modules(bench, graph, found, groups, budget_bytes)]
    if found.moves is None:
        regions = [region for group in groups for region in zip(group.members, group.calls, strict=True)]
        is_again: Bools = np.bincount(found.runs, minlength=graph.ops) > 1
        for depth in sorted({name.count(".") for name, _ in regions}):
            inside = [region for region in regions if region[0].count(".") >= depth]
            plans.append(_KeptCalls(bench, is_again, inside).fastest(budget_bytes))
    return min((plan for plan in plans if plan is not None), key=lambda one: one.step_time_us, default=None)


class _KeptCalls:
    """Regions that keep what a schedule does not repeat: one checkpointed module each, none inside another."""

    def __init__(self, bench: Workbench, is_again: Bools, modules: Sequence[tuple[str, range]]) -> None:
        """Finds the outermost modules in which operators are repeated.

        Args:
            bench: Replays plans.
            is_again: Whether the schedule repeats each operator, shape ``(ops,)``.
            modules: Names of modules and the operators of their calls.
        """
        self._bench = bench
        self._regions: dict[str, range] = {}
        for name, call in sorted(modules, key=lambda module: module[0].count(".")):
            if is_again[call.start : call.stop].any() and are_apart([name], self._regions):
                self._regions[name] = call
        self._keepable = {name: self._may_keep(call) for name, call in self._regions.items()}
        self._order = self._drop_order(is_again)

    def fastest(self, budget_bytes: int) -> Candidate | None:
        """Returns the plan that keeps most of the calls and fits; None where none does."""
        low, high, best = 0, len(self._order), None
        if not high:
            return None
        while low <= high:
            dropped = (low + high) // 2
            plan = self._plan(dropped)
            if plan is not None and self._bench.fits(plan, budget_bytes):
                high = dropped - 1
                if best is None or plan.step_time_us < best.step_time_us:
                    best = plan
            else:
                low = dropped + 1
        return best

    def _drop_order(self, is_again: Bools) -> Ints:
        """Returns the calls that may be kept: first those repeated, then the others, the least time per byte first."""
        step = self._bench.step
        ops = np.concatenate([np.arange(0), *self._keepable.values()]).astype(np.int64)
        density = np.nan_to_num(step.ops.duration_us[ops]) / step.born_bytes()[ops]
        order: Ints = ops[np.lexsort((ops, density.round(9), ~is_again[ops]))]
        return order

    def _may_keep(self, call: range) -> Ints:
        """Returns the operators of a region that make something that may be kept."""
        ops = np.arange(call.start, call.stop)
        ops = ops[may_be_kept(self._bench.step, ops)]
        return ops[self._bench.step.born_bytes()[ops] > 0]

    def _plan(self, dropped: int) -> Candidate | None:
        """Replays the plan that drops the first so many calls; regions that would keep all calls are left out."""
        kept = np.zeros(len(self._bench.step.ops), dtype=np.bool_)
        kept[self._order[dropped:]] = True
        modules: dict[tuple[str, ...], list[str]] = {}
        for name, call in self._regions.items():
            ops = self._keepable[name]
            if not kept[ops].all():
                entries = keep_entries(self._bench.step, call, ops[kept[ops]])
                modules.setdefault(entries, []).append(name)
        return self._bench.try_plan(*(Checkpoint(tuple(names), keep=keep) for keep, names in modules.items()))


def _whole_modules(
    bench: Workbench, graph: Graph, found: ScheduleResult, groups: Sequence[Group], budget_bytes: int
) -> Candidate | None:
    """Chooses the modules of which the schedule drops, or moves, most of the bytes, outermost first.

    If that does not fit, the next in that order are added; if it does, those with the lowest shares are removed while
    it still fits.
    """
    order = sorted(_choices(bench.step, graph, found, groups), key=lambda choice: -choice.share)
    chosen: list[_Choice] = []
    for choice in order:
        if choice.share >= _CHOSEN_SHARE and choice.is_apart_from(chosen):
            chosen.append(choice)
    more = [choice for choice in order if choice.is_apart_from(chosen)]
    best = _replayed(bench, chosen)
    while more and (best is None or not bench.fits(best, budget_bytes)):
        chosen.append(more.pop(0))
        more = [choice for choice in more if choice.is_apart_from(chosen)]
        best = _replayed(bench, chosen)
    if best is None or not bench.fits(best, budget_bytes):
        return None
    for choice in reversed(tuple(chosen)):
        rest = [other for other in chosen if other != choice]
        less = _replayed(bench, rest)
        if less is not None and bench.fits(less, budget_bytes) and less.step_time_us < best.step_time_us:
            chosen, best = rest, less
    return best


def _replayed(bench: Workbench, chosen: Sequence[_Choice]) -> Candidate | None:
    again = tuple(choice.name for choice in chosen if not choice.is_moved)
    moved = tuple(choice.name for choice in chosen if choice.is_moved)
    policies: list[Policy] = [Checkpoint(again)] if again else []
    if moved:
        policies.append(Swap(moved, to="host" if bench.step.targets_device() else "disk"))
    return bench.try_plan(*policies)


def _choices(step: Step, graph: Graph, found: ScheduleResult, groups: Sequence[Group]) -> list[_Choice]:
    """Returns, for each module, the share of its saved bytes that a schedule recomputes or moves."""
    assert found.runs is not None
    is_again: Bools = np.bincount(found.runs, minlength=graph.ops)[graph.value_op] > 1
    is_moved: Bools = np.zeros(graph.values, dtype=np.bool_)
    if found.moves is not None:
        is_moved[found.moves.value] = True
    is_saved = graph.is_saved()
    number = {name: row for row, name in reversed(list(enumerate(module_names(step))))}
    calls = step.module_calls
    is_known = ~calls.is_recompute & (calls.first_op_id != NONE)
    choices = []
    for name in dict.fromkeys(member for group in groups for member in group.members):
        inside = np.zeros(graph.values, dtype=np.bool_)
        for row in np.flatnonzero(is_known & (calls.module_id == number[name])):
            inside |= (graph.value_op >= calls.first_op_id[row]) & (graph.value_op <= calls.last_op_id[row])
        inside &= is_saved
        total = int(graph.value_bytes[inside].sum())
        again, moved = (int(graph.value_bytes[inside & kind].sum()) for kind in (is_again, is_moved))
        if total:
            choices.append(_Choice(name, moved > again, max(again, moved) / total))
    return choices


def remat_of(step: Step, graph: Graph, runs: Ints, budget: str = "") -> Remat | None:
    """Returns the policy that drops what a schedule recomputes.

    A schedule also says when each value is dropped and how long it stays after recompute; the policy drops it as soon
    as nothing else holds it and recomputes it when backward needs it.

    Args:
        step: The step.
        graph: Its graph.
        runs: The schedule.
        budget: Budget to hold as a hard memory cap too, as text; "" for none.

    Returns:
        The policy; None where the schedule recomputes nothing that backward reads.
    """
    times = np.bincount(runs, minlength=graph.ops)
    is_again = (times[graph.value_op] > 1) & graph.is_saved()
    keys = keys_of(step)
    chosen = tuple(dict.fromkeys(keys[op_id] for op_id in graph.value_op[is_again].tolist() if keys[op_id]))
    return Remat(budget=budget, recompute=chosen) if chosen else None
