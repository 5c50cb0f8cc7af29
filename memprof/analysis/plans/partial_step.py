"""What a recording of an incomplete step implies: a lower bound on the memory of the whole step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.analysis.out_of_memory.post_mortem import PostMortem, examine, failing_step
from memprof.analysis.report.breakdown import Breakdown, Holding, by_category, hold_at
from memprof.analysis.report.moments import Moment, describe_moment
from memprof.analysis.report.sources import find_sources
from memprof.errors import PolicyError
from memprof.policies.accumulate.batch import Batch, find_batch, likely_batch
from memprof.replay.live import live_bytes, peak_op
from memprof.trace.manifest import Manifest
from memprof.trace.schema import Optimizers, OutOfMemory
from memprof.trace.step import Step
from memprof.trace.store import Trace

#: What persists from the first update on, whatever the batch.
_LASTING = ("parameter", "buffer", "gradient", "optimizer_state")


@dataclass(frozen=True, eq=False)
class PartialStep:
    """An incomplete step, and what follows for the whole.

    Attributes:
        trace: The recording, as it was named.
        manifest: Its manifest.
        failure: Why the recording ends there, None where memory did not run out.
        moment: The moment with the most allocated bytes.
        reached: Allocated bytes at that moment.
        asked_bytes: Bytes of the failed request on top; 0 where nothing failed.
        parameter_bytes: Parameters and buffers.
        gradient_bytes: All gradients, as many as the optimizers update parameters.
        state_bytes: The full optimizer state, as far as known.
        state_missing_bytes: The part of it not yet allocated.
        unknown: Optimizers whose class has an unknown state size.
        batch: The recorded batch, None where the recorded part does not show it.
        growing_bytes: Bytes, of those reached and requested, that grow with the batch.
    """

    trace: str
    manifest: Manifest
    failure: PostMortem | None
    moment: Moment
    reached: Breakdown[str]
    asked_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    state_missing_bytes: int
    unknown: tuple[str, ...]
    batch: int | None
    growing_bytes: int

    @property
    def update_bytes(self) -> int:
        """Lower bound at the update: parameters, gradients and the full optimizer state."""
        return self.parameter_bytes + self.gradient_bytes + self.state_bytes

    @property
    def seen_bytes(self) -> int:
        """Memory of the recorded part with the optimizer state allocated, as in every step but the first."""
        return self.reached.total_bytes + self.asked_bytes + self.state_missing_bytes

    @property
    def least_bytes(self) -> int:
        """Lower bound on the peak of a whole step."""
        return max(self.update_bytes, self.seen_bytes)

    def largest_batch(self, budget_bytes: int) -> int | None:
        """Returns the largest batch that fits by the recorded part; the rest of the step may need more.

        None where the batch is unknown; 0 where not even one sample fits.
        """
        if self.batch is None or not self.growing_bytes:
            return None
        if self.update_bytes > budget_bytes:
            return 0
        fixed = self.seen_bytes - self.growing_bytes
        return max(0, (budget_bytes - fixed) * self.batch // self.growing_bytes)


def examine_partial(trace: Trace) -> PartialStep:
    """Returns what a recording without a complete step implies.

    Raises:
        BadInputError: The trace contains no operators, or is damaged.
    """
    failure = examine(trace)
    step, op, requested = _furthest(trace)
    holding = hold_at(step, op)
    split = by_category(holding)
    optimizers = trace.table(Optimizers)
    known = optimizers.full_state_bytes >= 0
    state = np.where(known, optimizers.full_state_bytes, optimizers.state_bytes)
    trained = int(optimizers.parameter_bytes.sum()) if len(optimizers) else int(step.modules.parameter_bytes.sum())
    batch = _batch(step)
    return PartialStep(
        trace=str(trace.path),
        manifest=trace.manifest,
        failure=failure,
        moment=describe_moment(step, find_sources(step.stacks), op, holding.total_bytes),
        reached=split,
        asked_bytes=requested,
        parameter_bytes=sum(part.bytes for part in split.parts if part.key in ("parameter", "buffer")),
        gradient_bytes=trained,
        state_bytes=int(state.sum()),
        state_missing_bytes=int(np.maximum(state - optimizers.state_bytes, 0).sum()),
        unknown=tuple(str(name).rpartition(".")[2] for name in optimizers.name[~known & (optimizers.state_bytes == 0)]),
        batch=None if batch is None else batch.size,
        growing_bytes=0 if batch is None else _growing(holding, batch, requested),
    )


def _furthest(trace: Trace) -> tuple[Step, int, int]:
    """Returns the incomplete step, its fullest operator, and the bytes of a failed request where that is the last."""
    failures = trace.table(OutOfMemory)
    for row in reversed(range(len(failures))):
        found = failing_step(trace, failures, row)
        if found is not None and not failures.is_caught[row]:
            step, op = found
            during, requested = live_bytes(step).during, max(0, int(failures.requested_bytes[row]))
            fullest = peak_op(step)
            return (step, op, requested) if during[op] + requested >= during[fullest] else (step, fullest, 0)
    step = trace.fullest_step()
    return step, peak_op(step), 0


def _batch(step: Step) -> Batch | None:
    try:
        return find_batch(step, likely_batch(step))
    except PolicyError:
        return None  # too little of forward was recorded, or the model takes no batch


def _growing(holding: Holding, batch: Batch, asked_bytes: int) -> int:
    """Returns the bytes of a moment that grow with the batch: what is computed from it, and the request made then."""
    step = holding.step
    is_input = (step.storages.category[holding.rows] == "input") & batch.is_from_input[holding.rows]
    grows = batch.is_proportional[holding.rows] | is_input
    phase = step.ops.phase[holding.op_id]
    more = asked_bytes + holding.workspace_bytes if phase in ("forward", "backward") else 0
    return int(holding.bytes[grows].sum()) + more
