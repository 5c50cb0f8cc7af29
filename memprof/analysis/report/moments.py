"""Moments: a step's peak, its fullest operators, and the end state of a snapshot without a history."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from memprof.analysis.report.sources import SourceLine, Sources
from memprof.json_values import key
from memprof.replay.live import live_bytes, live_bytes_by_category, peak_op
from memprof.trace.schema import NONE, AllocatorEvents, Modules, Ops, Segments, Steps, Storages
from memprof.trace.step import Step
from memprof.trace.store import Trace

NO_HISTORY = "contains no history of allocations, only the reserved memory at its end"


@dataclass(frozen=True)
class Moment:
    """One operator of a step and the live memory while it runs.

    Attributes:
        step: Number of the step in the job.
        op_id: Index of the operator in the step.
        phase: Its phase.
        op: Its name.
        module: Qualified name of its module, "" for the root without a name, None outside any module.
        module_title: The same with the root's type instead of "".
        source: The user's line of code that called it, for backward that of its forward.
        allocated_bytes: The allocator counter's maximum while the operator runs.
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
        """Describes what runs: ``backward of layers.3.mlp (aten.mm.default), model.py:57``."""
        module = "" if self.module_title is None else f" of {self.module_title}"
        source = "" if self.source is None else f", {self.source.place}"
        return f"{self.phase}{module} ({self.op}){source}"


@dataclass(frozen=True)
class CategoryMaximum:
    """The maximum of one category over a step, whenever it occurs.

    Attributes:
        category: The category.
        maximum_bytes: Its own maximum.
        op_id: The first operator that reaches it.
    """

    category: str
    maximum_bytes: int
    op_id: int


def describe_moment(step: Step, sources: Sources, op_id: int, allocated_bytes: int) -> Moment:
    """Describes what runs at an operator.

    Args:
        step: The step.
        sources: Source lines of the trace's stacks.
        op_id: The operator, counted from 0 in the step.
        allocated_bytes: Allocated bytes while it runs.
    """
    return _moment(step.number, op_id, allocated_bytes, step.modules, step.ops, op_id, sources)


def _moment(
    step: int, op_id: int, allocated_bytes: int, modules: Modules, ops: Ops, row: int, sources: Sources
) -> Moment:
    module_id = int(ops.module_id[row])
    module = None if module_id == NONE else str(modules.name[module_id])
    return Moment(
        step=step,
        op_id=op_id,
        phase=str(ops.phase[row]),
        op=str(ops.name[row]),
        module=module,
        module_title=module or (None if module is None else str(modules.type[module_id])),
        source=sources.of_stack(int(ops.stack_id[row])),
        allocated_bytes=allocated_bytes,
    )


def find_peaks(trace: Trace, sources: Sources) -> dict[int, Moment]:
    """Returns the first moment of the peak of each step with operators, by step number; cuts out no sound step.

    Raises:
        BadInputError: A step uses storages that are not alive.
    """
    trace.check_steps()
    peaks, steps, modules = trace.peaks(), trace.table(Steps), trace.table(Modules)
    ops = trace.table(Ops).take([row for _, row in peaks.values()])
    first = dict(zip(steps.step.tolist(), steps.first_op_id.tolist(), strict=True))
    return {
        number: _moment(number, int(ops.op_id[place]) - first[number], size, modules, ops, place, sources)
        for place, (number, (size, _)) in enumerate(peaks.items())
    }


def find_peak(step: Step, sources: Sources) -> Moment:
    """Returns the first moment of a step's peak."""
    op_id = peak_op(step)
    return describe_moment(step, sources, op_id, int(live_bytes(step).during[op_id]))


def find_phase_peaks(step: Step, sources: Sources) -> tuple[Moment, ...]:
    """Returns the first peak of each phase in the step, in the order of the step."""
    during = live_bytes(step).during
    op_ids = []
    for phase in dict.fromkeys(step.ops.phase.tolist()):
        inside = np.flatnonzero(step.ops.phase == phase)
        op_ids.append(int(inside[np.argmax(during[inside])]))
    return tuple(describe_moment(step, sources, op_id, int(during[op_id])) for op_id in sorted(op_ids))


def find_category_maxima(step: Step) -> dict[str, CategoryMaximum]:
    """Returns each category's own maximum over a step; categories that are always empty are omitted."""
    maxima = {}
    for category, curve in live_bytes_by_category(step).items():
        op_id = int(np.argmax(curve))
        if curve[op_id] > 0:
            maxima[category] = CategoryMaximum(category, int(curve[op_id]), op_id)
    return maxima


@dataclass(frozen=True)
class EndState:
    """The segments of a snapshot, in bytes.

    Attributes:
        segments: Number of segments.
        reserved: Bytes of all segments.
        allocated: Blocks in use.
        requested: Requested bytes of those and of pending blocks.
        pending: Pending free (in use by another stream).
        idle: Segments that are entirely free.
        holes: Free bytes in segments with blocks in use.
    """

    segments: int
    reserved: int = field(metadata=key("reserved_bytes"))
    allocated: int = field(metadata=key("allocated_bytes"))
    requested: int = field(metadata=key("requested_bytes"))
    pending: int = field(metadata=key("pending_bytes"))
    idle: int = field(metadata=key("idle_segments_bytes"))
    holes: int = field(metadata=key("holes_bytes"))


def is_end_state_only(trace: Trace) -> bool:
    """Whether a recording contains only the final state of reserved memory, without a history.

    A memory snapshot taken without a history lists what is in use; it contains no free events and no segment events.
    """
    if not len(trace.table(Segments)):
        return False
    freed = trace.columns(Storages, "freed_op_id")["freed_op_id"]
    actions = trace.columns(AllocatorEvents, "action")["action"]
    return bool(np.all(freed == NONE)) and not {"segment_alloc", "segment_map"} & set(actions.distinct.tolist())


def describe_end(segments: Segments) -> EndState:
    """Summarizes segments."""
    free = segments.total_size_bytes - segments.active_size_bytes
    is_idle = segments.active_size_bytes == 0
    return EndState(
        segments=len(segments),
        reserved=int(segments.total_size_bytes.sum()),
        allocated=int(segments.allocated_size_bytes.sum()),
        requested=int(segments.requested_size_bytes.sum()),
        pending=int((segments.active_size_bytes - segments.allocated_size_bytes).sum()),
        idle=int(free[is_idle].sum()),
        holes=int(np.sum(free[~is_idle])),
    )
