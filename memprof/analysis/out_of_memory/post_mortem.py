"""The post-mortem of a job that ran out of memory: the failed request, the live memory, and what was still to come."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from memprof.analysis.report.breakdown import Breakdown, Holding, by_category, by_module, by_source, hold_at
from memprof.analysis.report.module_tree import ModuleTree, folded_tree
from memprof.analysis.report.sources import SourceLine, Sources, find_sources
from memprof.analysis.report.table_rows import LargeStorage, find_largest
from memprof.json_values import LEFT_OUT, key
from memprof.replay.live import live_bytes
from memprof.trace.cut import cuttable_steps
from memprof.trace.schema import NONE, Modules, Optimizers, OutOfMemory, Stacks, Steps
from memprof.trace.step import Step
from memprof.trace.store import Trace
from memprof.trace.whole_steps import has_whole_step

if TYPE_CHECKING:
    from memprof.analysis.out_of_memory.room import Room

_LARGEST = 3


@dataclass(frozen=True)
class OptimizerState:
    """One optimizer's state at the moment memory ran out.

    Attributes:
        name: Its class name, without the module.
        parameter_bytes: Bytes of the parameters it updates.
        state_bytes: Bytes of its state at that moment.
        full_bytes: Bytes of its state after an update; None where unknown for its class.
    """

    name: str
    parameter_bytes: int = field(metadata=LEFT_OUT)
    state_bytes: int
    full_bytes: int | None = field(metadata=key("full_state_bytes"))

    @property
    def missing_bytes(self) -> int:
        """State bytes still to be allocated, as far as known."""
        return 0 if self.full_bytes is None else max(0, self.full_bytes - self.state_bytes)


@dataclass(frozen=True, eq=False)
class Held:
    """Live memory on the device when memory ran out.

    Attributes:
        holding: The storages.
        tree: Modules, repeated layers folded.
        by_category: Live bytes by category.
        by_module: Live bytes by the module that owns or allocated them.
        by_source: Live bytes by the line of the user's code that allocated them.
        largest: The largest storages.
        fullest_bytes: The step's peak until then.
    """

    holding: Holding
    tree: ModuleTree
    by_category: Breakdown[str]
    by_module: Breakdown[int]
    by_source: Breakdown[SourceLine]
    largest: tuple[LargeStorage, ...]
    fullest_bytes: int

    @property
    def total_bytes(self) -> int:
        """Total live bytes."""
        return self.holding.total_bytes

    def category_bytes(self, category: str) -> int:
        """Returns the bytes of one category."""
        return sum(part.bytes for part in self.by_category.parts if part.key == category)


@dataclass(frozen=True, eq=False)
class PostMortem:
    """The failed memory request; of several, the one that ended the job.

    Sizes are None where unknown.

    Attributes:
        rank: The rank that failed.
        failures: Number of failed requests in that rank.
        is_caught: Whether the job continued after this and all other failures.
        device: Device of the request.
        requested_bytes: Requested bytes.
        op: Operator that made the request, "" outside operators.
        phase: Its phase, "" where unknown.
        step: Number of the step, None where unknown.
        module: Name of the module, or the type of the root; None outside any module.
        source: The user's line of code.
        message: First line of the error.
        allocated_bytes: Allocated bytes by the allocator's own count.
        reserved_bytes: Reserved bytes of its segments.
        largest_free_bytes: The largest free block in them.
        free_bytes: Free bytes of the device, or of the limit.
        total_bytes: Memory of the device, or the limit.
        machine_bytes: Memory of the machine.
        held: Live memory at that moment; None where the recording does not cover it.
        gradients_missing_bytes: Gradients still to be allocated in the step.
        optimizers: The state of each optimizer.
        has_whole_step: Whether the recording contains a complete step.
        room: Where the device's memory was; None where the recording does not show it.
    """

    rank: int
    failures: int
    is_caught: bool
    device: str
    requested_bytes: int | None
    op: str
    phase: str
    step: int | None
    module: str | None
    source: SourceLine | None
    message: str
    allocated_bytes: int | None
    reserved_bytes: int | None
    largest_free_bytes: int | None
    free_bytes: int | None
    total_bytes: int | None
    machine_bytes: int
    held: Held | None
    gradients_missing_bytes: int
    optimizers: tuple[OptimizerState, ...]
    has_whole_step: bool
    room: Room | None = None

    @property
    def cached_bytes(self) -> int | None:
        """Reserved bytes of the caching allocator that are not allocated; None where there is no caching allocator."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return self.reserved_bytes - self.allocated_bytes

    @property
    def room_bytes(self) -> int | None:
        """Bytes torch could have allocated on the device, including those it already had; None where unknown."""
        had = self.reserved_bytes
        if had is None:
            had = self.allocated_bytes if self.held is None else self.held.total_bytes
        if had is None or self.free_bytes is None:
            return None
        # Whatever was allocated earlier was available, too.
        return max(had + self.free_bytes, 0 if self.held is None else self.held.fullest_bytes)

    @property
    def is_fragmented(self) -> bool:
        """Whether enough memory was free, but in pieces too small for the request, and enough of it to matter."""
        if self.room is not None:
            return self.room.is_fragmented
        requested, cached, largest = self.requested_bytes, self.cached_bytes, self.largest_free_bytes
        free = self.free_bytes or 0
        if requested is None or cached is None or largest is None:
            return False
        return max(largest, free) < requested <= cached + free

    @property
    def state_missing_bytes(self) -> int:
        """Optimizer state still to be allocated, as far as known."""
        return sum(optimizer.missing_bytes for optimizer in self.optimizers)


def examine(trace: Trace) -> PostMortem | None:
    """Returns the post-mortem of a recording in which memory ran out, None for other recordings.

    Of several ranks, it is that of the first rank whose failed request ended the job.

    Raises:
        BadInputError: The trace is damaged.
    """
    found = [one for rank in trace.ranks if (one := _examine_rank(trace.rank_trace(rank))) is not None]
    return min(found, key=lambda one: (one[0].is_caught, one[1]), default=(None, 0.0))[0]


def _examine_rank(trace: Trace) -> tuple[PostMortem, float] | None:
    failures = trace.table(OutOfMemory)
    if not len(failures):
        return None
    fatal = np.flatnonzero(~failures.is_caught)
    row = int(fatal[-1]) if len(fatal) else len(failures) - 1
    sources = find_sources(trace.table(Stacks))
    held = _held(trace, failures, row, sources)
    module_id = int(failures.module_id[row])
    modules = trace.table(Modules)
    step = int(failures.step[row])
    optimizers = _optimizers(trace.table(Optimizers))
    from memprof.analysis.out_of_memory.room import find_room  # replays allocators, and few jobs run out of memory

    post_mortem = PostMortem(
        rank=trace.rank,
        failures=len(failures),
        is_caught=not len(fatal),
        device=str(failures.device[row]),
        requested_bytes=_known(failures.requested_bytes[row]),
        op=str(failures.name[row]),
        phase=str(failures.phase[row]),
        step=None if step == NONE else step,
        module=None if module_id == NONE else str(modules.name[module_id] or modules.type[module_id]),
        source=sources.of_stack(int(failures.stack_id[row])),
        message=str(failures.message[row]),
        allocated_bytes=_known(failures.allocated_bytes[row]),
        reserved_bytes=_known(failures.reserved_bytes[row]),
        largest_free_bytes=_known(failures.largest_free_bytes[row]),
        free_bytes=_known(failures.free_bytes[row]),
        total_bytes=_known(failures.total_bytes[row]),
        machine_bytes=trace.manifest.machine.memory_bytes,
        held=held,
        gradients_missing_bytes=0,
        optimizers=optimizers,
        has_whole_step=has_whole_step(trace),
        room=find_room(trace, failures, row),
    )
    return replace(post_mortem, gradients_missing_bytes=_gradients(post_mortem, modules)), float(failures.time_us[row])


def failing_step(trace: Trace, failures: OutOfMemory, row: int) -> tuple[Step, int] | None:
    """Returns the step of a failed request and its operator's index in the step; None where not recorded."""
    op_id, steps = int(failures.op_id[row]), trace.table(Steps)
    inside = cuttable_steps(steps) & (steps.first_op_id <= op_id) & (op_id <= steps.last_op_id)
    if op_id == NONE or not inside.any():
        return None
    step = trace.step(int(steps.step[inside][0]))
    return step, op_id - step.first_op_id


def _held(trace: Trace, failures: OutOfMemory, row: int, sources: Sources) -> Held | None:
    found = failing_step(trace, failures, row)
    if found is None:
        return None
    step, op = found
    holding = hold_at(step, op)
    is_there = step.storages.device[holding.rows] == failures.device[row]
    if is_there.any():  # host memory does not fill a device
        holding = holding.only(is_there)
    tree = folded_tree(step.modules)
    return Held(
        holding=holding,
        tree=tree,
        by_category=by_category(holding),
        by_module=by_module(holding, tree),
        by_source=by_source(holding, sources),
        largest=find_largest(holding, sources, _LARGEST),
        fullest_bytes=int(live_bytes(step).during[: op + 1].max()),
    )


def _optimizers(table: Optimizers) -> tuple[OptimizerState, ...]:
    return tuple(
        OptimizerState(
            name=str(table.name[row]).rpartition(".")[2],
            parameter_bytes=int(table.parameter_bytes[row]),
            state_bytes=int(table.state_bytes[row]),
            full_bytes=_known(table.full_state_bytes[row]),
        )
        for row in range(len(table))
    )


def _gradients(found: PostMortem, modules: Modules) -> int:
    """Returns the bytes of gradients still to come: those of parameters an optimizer updates, or of all."""
    if found.held is None or found.phase not in ("forward", "backward"):
        return 0
    trained = sum(optimizer.parameter_bytes for optimizer in found.optimizers)
    if not found.optimizers:
        trained = int(modules.parameter_bytes.sum())
    return max(0, trained - found.held.category_bytes("gradient"))


def _known(number: int | np.int64) -> int | None:
    return None if number == NONE else int(number)
