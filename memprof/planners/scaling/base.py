"""The rule for another batch size from a single recording."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from memprof.errors import InconclusiveError, PolicyError, UsageError
from memprof.policies.accumulate.batch import Batch, find_batch, likely_batch
from memprof.policies.accumulate.scale import scale_step
from memprof.replay.rounding import rounded
from memprof.trace.schema import NONE, Bools, Ints, Memory, Storages
from memprof.trace.step import Step

if TYPE_CHECKING:
    from collections.abc import Iterator


def check_size(size: int) -> None:
    """Rejects an invalid size.

    Raises:
        UsageError: It is not positive.
    """
    if size < 1:
        raise UsageError(f"invalid size {size}: must be at least 1.")


def resized(base: Storages, requested: Ints, shape: object) -> Storages:
    """Sets the sizes of storages, rounded as by their allocators.

    Args:
        base: The storages as recorded.
        requested: Requested bytes of each; where they are as recorded, so are the allocated bytes.
        shape: The matching shapes.
    """
    allocated = rounded(requested, base.device)
    # Memory not owned by the allocator is unchanged.
    keeps = (requested == base.requested_bytes) | (base.allocated_bytes == 0)
    return base.replace(
        requested_bytes=requested, allocated_bytes=np.where(keeps, base.allocated_bytes, allocated), shape=shape
    )


@dataclass(frozen=True, eq=False)
class InferredBatch:
    """A step at any batch size, by the rule that splits a batch into micro-batches, in both directions.

    The batch is a dimension of the inputs, the first unless another fits better; storages computed from them that have
    it among their dimensions, or a multiple of it, scale with it, and so do the workspaces and times of the operators
    that touch them.

    Attributes:
        step: The recorded step.
        batch: Its batch dimension.
        source: Source of other sizes, of policies.base.SOURCES.
    """

    source: ClassVar[str] = "rule"
    step: Step
    batch: Batch

    @property
    def sizes(self) -> tuple[int, ...]:
        """The recorded batch size."""
        return (self.batch.size,)

    def step_at(self, size: int) -> Step:
        """Returns the step at a batch size.

        Raises:
            UsageError: The batch size is not positive.
        """
        check_size(size)
        step = self.step
        scaled = scale_step(step, self.batch, size, np.ones(len(step.ops), dtype=np.bool_))
        # Unlike in a micro-batch, the inputs of a step scale with the batch too.
        grows = self.batch.is_proportional | self._standing_batches()
        made = dataclasses.replace(scaled, batch=dataclasses.replace(self.batch, is_proportional=grows))
        rows, storages = made.ops(), made.storages(self._successors())
        return dataclasses.replace(
            step, duration_us=made.duration_us(rows), ops=rows, storages=storages, memory=Memory.empty()
        )

    def _standing_batches(self) -> Bools:
        """Finds inputs made before the step that are its whole batch: a job may train on the same batch every step."""
        storages, uses, ops = self.step.storages, self.step.uses, self.step.ops
        is_read = np.zeros(len(storages), dtype=np.bool_)
        is_read[uses.storage_id[ops.phase[uses.op_id] == "forward"]] = True
        size = str(self.batch.size)
        is_batch: Bools = np.array([size in text.split("x") for text in storages.shape.tolist()], dtype=np.bool_)
        is_batch &= is_read & (storages.category == "input") & (storages.created_op_id == NONE)
        return is_batch

    def _successors(self) -> Ints:
        """Finds for each storage left by the previous step (a batch, a loss) its successor in this step."""
        storages = self.step.storages
        made = storages.created_op_id != NONE
        successors = np.full(len(storages), NONE)
        waiting: dict[tuple[object, ...], Iterator[int]] = {}
        by_kind: dict[tuple[object, ...], list[int]] = defaultdict(list)
        kinds = list(
            zip(
                storages.dtype.tolist(),
                storages.shape.tolist(),
                storages.requested_bytes.tolist(),
                strict=True,
            )
        )
        for row in np.flatnonzero(made & (storages.freed_op_id == NONE) & self.batch.is_proportional).tolist():
            by_kind[kinds[row]].append(row)
        waiting = {kind: iter(rows) for kind, rows in by_kind.items()}
        owned = np.isin(storages.category, ("parameter", "buffer", "gradient", "optimizer_state"))
        for row in np.flatnonzero(~made & ~owned).tolist():
            successors[row] = next(waiting.get(kinds[row], iter(())), NONE)
        return successors


def scale_by_shape(step: Step) -> InferredBatch:
    """Infers from the shapes of one recording which of its dimensions are the batch.

    Raises:
        InconclusiveError: No input has a batch dimension, or the batch is a single sample.
    """
    try:
        return InferredBatch(step, find_batch(step, likely_batch(step)))
    except PolicyError as error:
        # Drop the policy's name from the message.
        reason = str(error).split(": ", 1)[-1]
        raise InconclusiveError(
            f"cannot determine the batch size from this recording ({reason.rstrip('.')}): record a second one at "
            "another batch size."
        ) from error
