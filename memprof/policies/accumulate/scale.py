"""Scales the operators and storages of a step from its whole batch to another size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memprof.policies.accumulate.batch import Batch
from memprof.replay.rounding import rounded
from memprof.trace.operator_facts import HAS_TILES, HOLDS_GRADIENT, REORDERS_WEIGHTS, are_among
from memprof.trace.schema import NONE, Bools, Floats, Ints, Ops, Storages, read_shape
from memprof.trace.step import Step

#: Fixed time of an operator, independent of its work, as the recorder times operators. Measured in a recorded AdamW
#: loop over tensors of up to 4 KiB (torch 2.13, one thread of an AMD EPYC): 1,059 additions and 1,056 multiplications
#: by a Python number took a median of 4.0 and 4.1 us (half of them 3.8 to 4.7); operators without a number (528 each of
#: sqrt, lerp_, addcmul_) took 1.0 to 2.2. The larger value is used: overestimating the time of micro-batches is
#: preferred to underestimating it.
CALL_US = 4.0


@dataclass(frozen=True, eq=False)
class Scaled:
    """How the rows of a step change with the size of its batch.

    Attributes:
        step: The step.
        batch: Its batch.
        size: Samples of the batch that it is scaled to.
        repeats: Operators that run once for each micro-batch. Shape (ops,).
        is_work: Operators that touch storages that grow with the batch. Shape (ops,).
        read_share: Share of each operator's reads that grows with the batch. Shape (ops,).
        write_share: The same for its writes. Shape (ops,).
        fixed_workspace_bytes: Workspace independent of the batch. Shape (ops,).
        least_workspace_bytes: Minimum workspace, however small the batch. Shape (ops,).
    """

    step: Step
    batch: Batch
    size: int
    repeats: Bools
    is_work: Bools
    read_share: Floats
    write_share: Floats
    fixed_workspace_bytes: Ints
    least_workspace_bytes: Ints

    def ops(self, times: int = 1) -> Ops:
        """Returns the operators: workspace scaled; time, work and traffic scaled and added up over micro-batches.

        Args:
            times: Number of micro-batches.
        """
        ops, fixed = self.step.ops, self.fixed_workspace_bytes
        share = np.where(self.is_work, self.size / self.batch.size, 1.0)
        workspace = np.maximum(fixed + (ops.workspace_bytes - fixed) * share, self.least_workspace_bytes)
        constant = np.minimum(ops.duration_us, CALL_US)
        runs = np.where(self.repeats, times, 1)
        read = (1 - self.read_share * (1 - share)) * runs
        written = (1 - self.write_share * (1 - share)) * runs
        return ops.replace(
            workspace_bytes=np.rint(workspace).astype(np.int64),
            duration_us=(constant + (ops.duration_us - constant) * share) * runs,
            flops=np.rint(ops.flops * share * runs).astype(np.int64),
            read_bytes=np.rint(ops.read_bytes * read).astype(np.int64),
            written_bytes=np.rint(ops.written_bytes * written).astype(np.int64),
        )

    def storages(self, carrier: Ints | None = None) -> Storages:
        """Returns the storages.

        Args:
            carrier: For a storage left by the previous step, its counterpart in this step; NONE elsewhere.
        """
        rows, grows = self.step.storages, self.batch.is_proportional
        if carrier is not None:
            grows = grows[np.where(carrier == NONE, np.arange(len(rows)), carrier)]
        # Whole samples times the bytes of one; bytes that are not a multiple of the samples are rounded up.
        requested = np.where(grows, -(-rows.requested_bytes * self.size // self.batch.size), rows.requested_bytes)
        allocated = np.where(grows & (rows.allocated_bytes > 0), rounded(requested, rows.device), rows.allocated_bytes)
        shapes = rows.shape.copy()
        texts, place = np.unique(shapes[grows].astype(str), return_inverse=True)
        shapes[grows] = np.array([self._shape(text) for text in texts], dtype=np.object_)[place]
        return rows.replace(requested_bytes=requested, allocated_bytes=allocated, shape=shapes)

    def duration_us(self, ops: Ops, times: int = 1) -> float:
        """Returns the step's duration: its operators, plus the recorded share of Python time between them.

        Args:
            ops: What ``ops`` returned.
            times: Number of micro-batches.
        """
        old = float(np.nansum(self.step.ops.duration_us))
        between = max(0.0, self.step.duration_us - old) / max(len(self.step.ops), 1)
        # Operators on several threads or streams may add up to more than the step.
        overlap = min(1.0, self.step.duration_us / old) if old else 1.0
        count = len(ops) + (times - 1) * int(self.repeats.sum())
        return float(np.nansum(ops.duration_us)) * overlap + between * count

    def _shape(self, text: str) -> str:
        sizes = list(read_shape(text))
        exact = [place for place, each in enumerate(sizes) if each == self.batch.size]
        multiple = [place for place, each in enumerate(sizes) if each and each % self.batch.size == 0]
        for place in (exact or multiple)[:1]:
            sizes[place] = sizes[place] * self.size // self.batch.size
        return "x".join(map(str, sizes))


def scale_step(step: Step, batch: Batch, size: int, repeats: Bools) -> Scaled:
    """Finds which part of each operator grows with the batch.

    The workspace of a kernel that touches the batch is assumed to grow with it, except for oneDNN's copies of weights
    in another layout (as large as the weights the operator reads), of their gradients, and attention's per-thread
    tiles. Measured on convolutions and LSTM layers at batches of 12, 6 and 3.

    Args:
        step: The step.
        batch: Its batch.
        size: Samples of the batch to scale to.
        repeats: Operators that run on that batch; the others stay as they are. Shape (ops,).
    """
    ops, uses = step.ops, step.uses
    # What a DataLoader made stays whole: the micro-batches are views of it.
    created = step.storages.created_op_id
    batch = replace(batch, is_proportional=batch.is_proportional & (created != NONE) & repeats[created])
    is_whole = step.storages.category == "input"
    grows = (batch.is_proportional | (batch.is_from_input & is_whole))[uses.storage_id]
    is_work = np.zeros(len(ops), dtype=np.bool_)
    is_work[uses.op_id[grows]] = True
    bytes_ = step.storages.requested_bytes[uses.storage_id]
    is_read = uses.role == "read"
    read_share, write_share = (
        _share(uses.op_id[chosen], bytes_[chosen], grows[chosen], len(ops)) for chosen in (is_read, ~is_read)
    )
    weights = is_read & (step.storages.category[uses.storage_id] == "parameter")
    weight_bytes = np.bincount(uses.op_id[weights], bytes_[weights], len(ops)).astype(np.int64)
    reorders, tiles, holds_gradient = (
        are_among(ops.name, each) for each in (REORDERS_WEIGHTS, HAS_TILES, HOLDS_GRADIENT)
    )
    weight_bytes = np.minimum(weight_bytes, np.maximum(ops.workspace_bytes, 0))
    fixed = np.where(reorders, weight_bytes, 0)
    fixed = np.where(tiles, ops.workspace_bytes, fixed)
    return Scaled(
        step=step,
        batch=batch,
        size=size,
        repeats=repeats,
        is_work=is_work & repeats,
        read_share=read_share,
        write_share=write_share,
        fixed_workspace_bytes=fixed,
        least_workspace_bytes=np.where(holds_gradient, weight_bytes, np.minimum(ops.workspace_bytes, 0)),
    )


def _share(op_ids: Ints, bytes_: Ints, grows: Bools, ops: int) -> Floats:
    total = np.bincount(op_ids, bytes_, ops)
    growing = np.bincount(op_ids, bytes_ * grows, ops)
    return np.divide(growing, total, out=np.zeros(ops), where=total > 0)
