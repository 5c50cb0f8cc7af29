"""Predicts a step that keeps saved activations in 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from memprof.policies.compress.policy import BLOCK, CHUNK, DEVICE_CHUNK
from memprof.policies.rewrite.draft import Draft
from memprof.policies.rewrite.elements import element_bytes
from memprof.policies.rewrite.insertion import COMPRESS, new_ops
from memprof.policies.swap.copies import HOOK_US
from memprof.policies.swap.records import Records, find_records
from memprof.replay.rounding import rounded
from memprof.trace.schema import NONE, Bools, Ints, Ops
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.compress.policy import Compress

_FLOATS = ("float64", "float32", "float16", "bfloat16")
#: Bytes read and written for a byte packed (the largest value of each block, the division, rounding, the cast) are
#: 6.25, and for a byte unpacked (the cast, the product) 3.25; these operators take 1.6 times as long for a byte as
#: additions and products do: median of the six jobs of tests/policies, one core of a virtual machine, torch 2.13.
_PACK_PASSES, _UNPACK_PASSES = 6.25 * 1.6, 3.25 * 1.6
#: Calling the operators, besides their work: seven to pack and four to unpack, and the hooks around them.
_PACK_US, _UNPACK_US = 100.0, 60.0
#: Operators that do little more than go through memory.
_ELEMENTWISE = ("add", "add_", "mul", "mul_", "div", "div_", "sub", "clone", "copy_", "relu", "relu_")
#: Speed in bytes a microsecond where the step has no operator to measure it by.
_BYTES_PER_US = 4e3


def transform(step: Step, policy: Compress) -> Step:
    """Rewrites a step as the policy would have changed it.

    Raises:
        PolicyError: A pattern matches no module.
    """
    records = find_records(step, policy.modules, policy.minimum_bytes, _FLOATS)
    draft = Draft(step)
    storages, at = step.storages, records.storage
    size, item = storages.requested_bytes[at], element_bytes(storages.dtype[at])
    count = size // item
    # 16-bit values are divided in 32 bits: they are cast beside the result.
    runs_on_cpu = (storages.device[at] == "cpu") & (step.planned_types is None)
    chunk = np.minimum(count, np.where(runs_on_cpu, CHUNK, DEVICE_CHUNK))
    temporary = chunk * np.where(item == 2, 8, item) + -(-chunk // BLOCK) * 4
    speed = _bytes_per_us(step)

    packs = _ops(step, records, records.packed, COMPRESS, _PACK_PASSES * size / speed + _PACK_US, temporary)
    pack_ids = draft.insert_ops(packs, records.packed)
    # Backward takes the original where somebody still holds it.
    is_packed: Bools = records.held < records.unpacked
    packed = records.take(is_packed)
    duration = (_UNPACK_PASSES * size / speed + _UNPACK_US)[is_packed]
    workspace = np.where(item == 2, -(-count // BLOCK) * item, 0)[is_packed]
    unpacks = _ops(step, packed, packed.unpacked, "memprof.decompress", duration, workspace)
    unpack_ids = draft.insert_ops(unpacks, packed.unpacked)
    draft.duration_us += float(packs.duration_us.sum() + unpacks.duration_us.sum()) + HOOK_US * records.hooked

    until = np.where(records.released == len(step.ops), NONE, records.released)
    until[is_packed] = unpack_ids
    codes = _insert(draft, step, at, pack_ids, until, count, "int8")
    scales = _insert(draft, step, at, pack_ids, until, -(-count // BLOCK) * 4, "float32")
    draft.use(pack_ids, at, "read")
    draft.use(pack_ids, codes, "write")
    draft.use(pack_ids, scales, "write")
    draft.use(unpack_ids, codes[is_packed], "read")
    draft.use(unpack_ids, scales[is_packed], "read")
    # Packed after nobody else holds it any more, it goes with the packing.
    last = np.where(packed.held < packed.packed, pack_ids[is_packed], packed.held)
    draft.split_lives(packed.storage, last, unpack_ids, packed.released)
    return draft.build()


def _insert(draft: Draft, step: Step, like: Ints, created: Ints, freed: Ints, size: Ints, dtype: str) -> Ints:
    """Inserts what stands for the originals in between."""
    rows = step.storages.take(like)
    rows = rows.replace(
        category=np.full(len(like), "activation", dtype=np.object_),
        requested_bytes=size,
        allocated_bytes=rounded(size, rows.device),
        created_op_id=created,
        freed_op_id=freed,
        shape=(size // (4 if dtype == "float32" else 1)).astype(str).astype(np.object_),
        dtype=np.full(len(like), dtype, dtype=np.object_),
    )
    return draft.insert_storages(rows)


def _ops(
    step: Step, records: Records, moments: Ints, name: str, duration_us: npt.NDArray[np.floating], workspace: Ints
) -> Ops:
    size = step.storages.requested_bytes[records.storage]
    return new_ops(
        step,
        name,
        moments,
        module_id=step.ops.module_id[records.forward_op],
        duration_us=duration_us,
        read_bytes=size,
        written_bytes=size,
        workspace_bytes=workspace,
    )


def _bytes_per_us(step: Step) -> float:
    """Returns how fast the step's own elementwise operators go through memory, which is what packing is made of."""
    ops = step.ops
    duration = np.nan_to_num(ops.duration_us)
    moved = ops.read_bytes + ops.written_bytes
    packets = np.array([name.split(".")[1] if "." in name else name for name in ops.name.tolist()], dtype=np.object_)
    is_sample = np.isin(packets, _ELEMENTWISE) & (ops.written_bytes >= 1 << 14) & (duration > 0)
    return float(moved[is_sample].sum() / duration[is_sample].sum()) if is_sample.any() else _BYTES_PER_US
