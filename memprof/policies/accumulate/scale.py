"""Scales the operators and storages of a step from the whole batch to a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memprof.policies.accumulate.batch import Batch
from memprof.policies.rewrite.depthwise import fixed_workspaces
from memprof.replay.rounding import rounded
from memprof.trace.schema import NONE, Bools, Floats, Ints, Ops, Storages
from memprof.trace.step import Step

#: Fixed time of an operator, independent of its work, as the recorder times operators. Measured in a recorded AdamW
#: loop over tensors of up to 4 KiB (torch 2.13, one thread of an AMD EPYC): 1,059 additions and 1,056 multiplications
#: by a Python number took a median of 4.0 and 4.1 us (half of them 3.8 to 4.7); operators without a number (528 each of
#: sqrt, lerp_, addcmul_) took 1.0 to 2.2. The larger value is used: overestimating the time of micro-batches is
#: preferred to underestimating it.
CALL_US = 4.0
#: Kernels whose workspace holds the weights in another layout, independent of the batch: oneDNN's.
_REORDERS_WEIGHTS = ("aten.convolution.", "aten.mkldnn_rnn_layer")
#: Kernels that hold the weight's gradient in another layout at their end, after freeing the rest of their workspace.
_HOLDS_GRADIENT = ("aten.convolution_backward.",)
#: Kernels whose workspace has a fixed size per thread: attention's tiles on CPU.
_TILES = ("flash_attention_for_cpu",)


@dataclass(frozen=True, eq=False)
class Scaled:
    """How the rows of a step become those of its micro-batches.

    Attributes:
        step: The step.
        batch: Its batch.
        share: Share of the samples of each micro-batch. Shape (parts,).
        is_work: Operators that touch storages that grow with the batch. Shape (ops,).
        read_share: Share of each operator's reads that grows with the batch. Shape (ops,).
        write_share: The same for its writes. Shape (ops,).
        fixed_workspace_bytes: Workspace independent of the batch. Shape (ops,).
        least_workspace_bytes: Minimum workspace, however small the batch. Shape (ops,).
        bytes_per_us: Throughput of operators that only add tensors.
    """

    step: Step
    batch: Batch
    share: Floats
    is_work: Bools
    read_share: Floats
    write_share: Floats
    fixed_workspace_bytes: Ints
    least_workspace_bytes: Ints
    bytes_per_us: float

    def ops(self, old_op: Ints, micro: Ints, repeats: Bools) -> Ops:
        """Returns the operators of the micro-batches: workspace, time, work and traffic scaled."""
        ops = self.step.ops.take(old_op)
        share = np.where(repeats[old_op], self.share[micro], 1.0)
        share = np.where(self.is_work[old_op], share, 1.0)
        fixed = self.fixed_workspace_bytes[old_op]
        workspace = fixed + (ops.workspace_bytes - fixed) * share
        workspace = np.maximum(workspace, self.least_workspace_bytes[old_op])
        constant = np.minimum(ops.duration_us, CALL_US)
        read = 1 - self.read_share[old_op] * (1 - share)
        written = 1 - self.write_share[old_op] * (1 - share)
        return ops.replace(
            workspace_bytes=np.rint(workspace).astype(np.int64),
            duration_us=constant + (ops.duration_us - constant) * share,
            flops=np.rint(ops.flops * share).astype(np.int64),
            read_bytes=np.rint(ops.read_bytes * read).astype(np.int64),
            written_bytes=np.rint(ops.written_bytes * written).astype(np.int64),
        )

    def storages(self, row: Ints, micro: Ints, carrier: Ints) -> Storages:
        """Returns the storages of the micro-batches.

        Args:
            row: Row in the step.
            micro: Its micro-batch.
            carrier: For a storage left by the previous step, its counterpart in this step; NONE elsewhere.
        """
        like = np.where(carrier[row] == NONE, row, carrier[row])
        grows = self.batch.is_proportional[like]
        rows = self.step.storages.take(row)
        parts = np.rint(self.share * self.batch.size).astype(np.int64)
        # Whole samples times the bytes of one; bytes that are not a multiple of the samples are rounded up.
        requested = np.where(grows, -(-rows.requested_bytes * parts[micro] // self.batch.size), rows.requested_bytes)
        allocated = np.where(grows & (rows.allocated_bytes > 0), rounded(requested, rows.device), rows.allocated_bytes)
        shapes = rows.shape.copy()
        for size in np.unique(parts).tolist():
            chosen = np.flatnonzero(grows & (parts[micro] == size))
            texts, place = np.unique(shapes[chosen].astype(str), return_inverse=True)
            shapes[chosen] = np.array([self._shape(text, size) for text in texts], dtype=np.object_)[place]
        return rows.replace(requested_bytes=requested, allocated_bytes=allocated, shape=shapes)

    def with_additions(self, ops: Ops, added: Ints, gradient: Ints, storages: Storages) -> Ops:
        """Adds the time and traffic of an addition to operators that took a gradient over."""
        bytes_ = storages.requested_bytes[gradient]
        durations, read, written = ops.duration_us.copy(), ops.read_bytes.copy(), ops.written_bytes.copy()
        durations[added] = np.maximum(durations[added], CALL_US + 3 * bytes_ / self.bytes_per_us)
        read[added], written[added] = 2 * bytes_, bytes_
        return ops.replace(duration_us=durations, read_bytes=read, written_bytes=written)

    def duration_us(self, ops: Ops) -> float:
        """Returns the step's duration: its operators, plus the recorded share of Python time between them."""
        old = float(np.nansum(self.step.ops.duration_us))
        between = max(0.0, self.step.duration_us - old) / max(len(self.step.ops), 1)
        # Operators on several threads or streams may add up to more than the step.
        overlap = min(1.0, self.step.duration_us / old) if old else 1.0
        return float(np.nansum(ops.duration_us)) * overlap + between * len(ops)

    def _shape(self, text: str, size: int) -> str:
        """Rewrites a shape that contains the batch for a micro-batch."""
        sizes = [int(part) for part in text.split("x")] if text else []
        exact = [place for place, each in enumerate(sizes) if each == self.batch.size]
        multiple = [place for place, each in enumerate(sizes) if each and each % self.batch.size == 0]
        for place in (exact or multiple)[:1]:
            sizes[place] = sizes[place] * size // self.batch.size
        return "x".join(map(str, sizes))


def scale_step(step: Step, batch: Batch, parts: Ints, repeats: Bools) -> Scaled:
    """Finds which part of each operator grows with the batch.

    The workspace of a kernel that touches the batch is assumed to grow with it, except for oneDNN's copies of weights
    in another layout (as large as the weights the operator reads), of their gradients, and attention's per-thread
    tiles. Measured on convolutions and LSTM layers at batches of 12, 6 and 3.
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
    names, name_of = np.unique(ops.name.astype(str), return_inverse=True)
    reorders = np.array([name.startswith(_REORDERS_WEIGHTS) for name in names], dtype=np.bool_)[name_of]
    tiles = np.array([any(part in name for part in _TILES) for name in names], dtype=np.bool_)[name_of]
    holds_gradient = np.array([name.startswith(_HOLDS_GRADIENT) for name in names], dtype=np.bool_)[name_of]
    weight_bytes = np.minimum(weight_bytes, np.maximum(ops.workspace_bytes, 0))
    fixed = np.where(reorders, weight_bytes, 0)
    fixed = np.where(tiles | fixed_workspaces(step), ops.workspace_bytes, fixed)
    return Scaled(
        step=step,
        batch=batch,
        share=parts / batch.size,
        is_work=is_work & repeats,
        read_share=read_share,
        write_share=write_share,
        fixed_workspace_bytes=fixed,
        least_workspace_bytes=np.where(holds_gradient, weight_bytes, np.minimum(ops.workspace_bytes, 0)),
        bytes_per_us=_addition_rate(step),
    )


def _share(op_ids: Ints, bytes_: Ints, grows: Bools, ops: int) -> Floats:
    total = np.bincount(op_ids, bytes_, ops)
    growing = np.bincount(op_ids, bytes_ * grows, ops)
    return np.divide(growing, total, out=np.zeros(ops), where=total > 0)


def _addition_rate(step: Step) -> float:
    """Returns bytes read and written per microsecond by the step's own larger additions."""
    ops = step.ops
    traffic = ops.read_bytes + ops.written_bytes
    is_addition = np.char.startswith(ops.name.astype(str), "aten.add") & (traffic >= 1 << 16) & (ops.duration_us > 0)
    if not is_addition.any():
        return 5_000.0  # 5 GB/s: a single core on large tensors
    return float(np.median(traffic[is_addition] / ops.duration_us[is_addition]))
