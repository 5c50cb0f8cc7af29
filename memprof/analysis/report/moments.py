"""Moments of a step: its peak, the fullest operator of each phase and of each category, and what runs there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.analysis.report.sources import SourceLine, Sources
from memprof.replay.live import live_bytes, live_bytes_by_category, peak_op
from memprof.trace.schema import NONE
from memprof.trace.step import Step


@dataclass(frozen=True)
class Moment:
    """One operator of a step and the memory held while it runs.

    Attributes:
        step: Number of the step in the job.
        op_id: Position of the operator in the step, 0 first.
        phase: Its phase.
        op: Its name.
        module: Qualified name of its module, "" for the root without a name, None outside any.
        module_title: The same with the root's type instead of "".
        source: The user's line of code that ran it, or whose backward it is.
        allocated_bytes: The allocator's counter at its highest while the operator runs.
    """

    step: int
    op_id: int
    phase: str
    op: str
    module: str | None
    module_title: str | None
    source: SourceLine | None
    allocated_bytes: int

    def describe(self) -> str:
        """Says what runs: ``backward of layers.3.mlp (aten.mm.default), model.py:57``."""
        module = "" if self.module_title is None else f" of {self.module_title}"
        source = "" if self.source is None else f", {self.source.place}"
        return f"{self.phase}{module} ({self.op}){source}"


@dataclass(frozen=True)
class CategoryMaximum:
    """The most that one category holds in a step, whenever that is.

    Attributes:
        category: The category.
        maximum_bytes: Its own maximum.
        op_id: The first operator at which it is reached.
    """

    category: str
    maximum_bytes: int
    op_id: int


def describe_moment(step: Step, sources: Sources, op_id: int, allocated_bytes: int) -> Moment:
    """Says what runs at an operator.

    Args:
        step: The step.
        sources: Source lines of the trace's stacks.
        op_id: The operator, counted from 0 in the step.
        allocated_bytes: What is held while it runs.
    """
    module_id = int(step.ops.module_id[op_id])
    module = None if module_id == NONE else str(step.modules.name[module_id])
    return Moment(
        step=step.number,
        op_id=op_id,
        phase=str(step.ops.phase[op_id]),
        op=str(step.ops.name[op_id]),
        module=module,
        module_title=module or (None if module is None else str(step.modules.type[module_id])),
        source=sources.of_stack(int(step.ops.stack_id[op_id])),
        allocated_bytes=allocated_bytes,
    )


def find_peak(step: Step, sources: Sources) -> Moment:
    """Returns the first moment at which a step holds the most."""
    op_id = peak_op(step)
    return describe_moment(step, sources, op_id, int(live_bytes(step).during[op_id]))


def find_phase_peaks(step: Step, sources: Sources) -> tuple[Moment, ...]:
    """Returns the first fullest moment of each phase that the step has, in the order of the step."""
    during = live_bytes(step).during
    op_ids = []
    for phase in dict.fromkeys(step.ops.phase.tolist()):
        inside = np.flatnonzero(step.ops.phase == phase)
        op_ids.append(int(inside[np.argmax(during[inside])]))
    return tuple(describe_moment(step, sources, op_id, int(during[op_id])) for op_id in sorted(op_ids))


def find_category_maxima(step: Step) -> dict[str, CategoryMaximum]:
    """Returns each category's own maximum over a step; categories that never hold anything are left out."""
    maxima = {}
    for category, curve in live_bytes_by_category(step).items():
        op_id = int(np.argmax(curve))
        if curve[op_id] > 0:
            maxima[category] = CategoryMaximum(category, int(curve[op_id]), op_id)
    return maxima
