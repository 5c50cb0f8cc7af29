"""Estimates a step that keeps saved activations in 8 bits: a quarter of float32; a dry run says what packing takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.policies.compress.policy import BLOCK
from memprof.policies.rewrite.draft import Draft, element_bytes
from memprof.policies.rewrite.insertion import COMPRESS, new_ops
from memprof.policies.swap.copies import HOOK_US
from memprof.policies.swap.records import find_records
from memprof.replay.rounding import rounded
from memprof.trace.schema import Texts
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.compress.policy import Compress

_FLOATS = ("float64", "float32", "float16", "bfloat16")
#: Calling the operators that pack a storage and unpack it, and their speed in bytes a microsecond.
_CALL_US, _BYTES_PER_US = 80.0, 500.0


def transform(step: Step, policy: Compress) -> Step:
    """Estimates a step, without the temporaries of packing.

    Raises:
        PolicyError: A pattern matches no module.
    """
    records = find_records(step, policy.modules, policy.minimum_bytes, _FLOATS)
    draft = Draft(step)
    # Backward takes the original where somebody still holds it.
    packed = records.take(records.held < records.unpacked)
    originals = step.storages.take(packed.storage)
    duration_us = _CALL_US + originals.requested_bytes / _BYTES_PER_US
    pack_ids, unpack_ids = (
        draft.insert_ops(new_ops(step, name, moments, duration_us=duration_us), moments)
        for name, moments in ((COMPRESS, packed.packed), ("memprof.decompress", packed.unpacked))
    )
    draft.duration_us += 2 * float(duration_us.sum()) + HOOK_US * records.hooked
    numbers = originals.requested_bytes // element_bytes(originals.dtype)
    size = numbers + -(-numbers // BLOCK) * 4
    dtype: Texts = np.full(len(packed), "int8", dtype=np.object_)
    codes = originals.replace(requested_bytes=size, allocated_bytes=rounded(size, originals.device), dtype=dtype)
    shape = numbers.astype(str).astype(np.object_)
    draft.insert_storages(codes.replace(created_op_id=pack_ids, freed_op_id=unpack_ids, shape=shape))
    draft.use(pack_ids, packed.storage, "read")
    # What is packed after nobody else holds it any more goes with the packing.
    last = np.where(packed.held < packed.packed, pack_ids, packed.held)
    draft.split_lives(packed.storage, last, unpack_ids, packed.released)
    return draft.build()
