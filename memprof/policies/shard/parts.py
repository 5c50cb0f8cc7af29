"""What is divided how: each rank's part of a storage, and the groups in which gradients are sent."""

from __future__ import annotations

import numpy as np

from memprof.replay.rounding import rounded_on_cuda
from memprof.trace.schema import NONE, Bools, Ints, Storages
from memprof.trace.step import Step

_MIB = 1 << 20
#: DDP makes its first bucket this large, so that sending begins early (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES).
_FIRST_BUCKET_BYTES = _MIB


def largest_parts(storages: Storages, ranks: int, *, is_cuda: bool) -> Ints:
    """Returns the bytes of the largest rank's part of each storage: its first dimension divided, rounded up."""
    texts, shape_of = np.unique(storages.shape.astype(str), return_inverse=True)
    first = np.array([int(text.partition("x")[0]) if text else 1 for text in texts])[shape_of]
    rows = -(-np.maximum(first, 1) // ranks)
    # A storage without a shape, such as a step counter, is not divided.
    parts: Ints = storages.requested_bytes * rows // np.maximum(first, 1)
    return rounded_on_cuda(parts) if is_cuda else parts


def complete_at(step: Step, is_made: Bools) -> Ints:
    """Returns, for each gradient the step makes, the backward operator after which it is complete; NONE elsewhere."""
    uses, ops = step.uses, step.ops
    found = np.where(is_made, step.storages.created_op_id, NONE)
    row = np.flatnonzero(is_made[uses.storage_id] & (ops.phase[uses.op_id] == "backward"))
    np.maximum.at(found, uses.storage_id[row], uses.op_id[row])
    return found


def unit_groups(kept_at: Ints, unit_of: Ints) -> list[Ints]:
    """Returns the gradients of each unit, the unit whose gradients are there first in front.

    Args:
        kept_at: Operator after which each gradient is complete, NONE elsewhere, shape ``(storages,)``.
        unit_of: The unit of each storage, shape ``(storages,)``.
    """
    made = np.flatnonzero(kept_at != NONE)
    groups = [made[unit_of[made] == unit] for unit in np.unique(unit_of[made])]
    return sorted(groups, key=lambda group: int(kept_at[group].max()))


def buckets(kept_at: Ints, requested_bytes: Ints, bucket_mib: int) -> list[Ints]:
    """Returns the gradients of each bucket, filled in the order in which they are there.

    Args:
        kept_at: Operator after which each gradient is complete, NONE elsewhere, shape ``(storages,)``.
        requested_bytes: Bytes of each storage, shape ``(storages,)``.
        bucket_mib: Size of a bucket, the first of which may be smaller.
    """
    made = np.flatnonzero(kept_at != NONE)
    made = made[np.argsort(kept_at[made], kind="stable")]
    found: list[list[int]] = []
    room = 0
    for row, bytes_ in zip(made.tolist(), requested_bytes[made].tolist(), strict=True):
        if room <= 0:
            room = bucket_mib * _MIB if found else min(_FIRST_BUCKET_BYTES, bucket_mib * _MIB)
            found.append([])
        found[-1].append(row)
        room -= bytes_
    return [np.array(bucket) for bucket in found]
