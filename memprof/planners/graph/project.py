"""From a schedule of operators to modules that policies can be applied to."""

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
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.runtime.model_names import module_names
from memprof.policies.swap.policy import Swap
from memprof.trace.schema import NONE, Bools
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
    """Chooses modules that follow a schedule, and replays the result.

    A schedule drops or moves individual values; policies apply to whole modules. Chosen are the modules of which the
    schedule drops, or moves, most of the bytes, outermost first. If that does not fit, the next in that order are
    added; if it does, those with the lowest shares are removed while it still fits.

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
    order = sorted(_choices(bench.step, graph, found, groups), key=lambda choice: -choice.share)
    chosen: list[_Choice] = []
    for choice in order:
        if choice.share >= _CHOSEN_SHARE and choice.is_apart_from(chosen):
            chosen.append(choice)
    more = [choice for choice in order if choice.is_apart_from(chosen)]
    best = _replayed(bench, chosen)
    while more and (best is None or bench.needed(best) > budget_bytes):
        chosen.append(more.pop(0))
        more = [choice for choice in more if choice.is_apart_from(chosen)]
        best = _replayed(bench, chosen)
    if best is None or bench.needed(best) > budget_bytes:
        return None
    for choice in reversed(tuple(chosen)):
        rest = [other for other in chosen if other != choice]
        less = _replayed(bench, rest)
        if less is not None and bench.needed(less) <= budget_bytes and less.step_time_us < best.step_time_us:
            chosen, best = rest, less
    return best


def _replayed(bench: Workbench, chosen: Sequence[_Choice]) -> Candidate | None:
    again = tuple(choice.name for choice in chosen if not choice.is_moved)
    moved = tuple(choice.name for choice in chosen if choice.is_moved)
    policies: list[Policy] = [Checkpoint(again)] if again else []
    if moved:
        policies.append(Swap(moved, to="host" if bench.step.is_on_device() else "disk"))
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
