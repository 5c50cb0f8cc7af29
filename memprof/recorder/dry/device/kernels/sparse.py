"""Temporary memory of CUDA's sparse kernels, from torch's sources.

The size of cuSPARSE's own buffers is not published, and not counted.
"""

from __future__ import annotations

from typing import Any

import torch

from memprof.recorder.dry.sparse.fakes import count_places, is_sparse, pattern_of
from memprof.recorder.memory.tensor_memory import parts_of

_aten = torch.ops.aten
_INT32, _INT64 = 4, 8
#: Products with a plain matrix, and the place of the sparse one.
_PRODUCTS = {_aten.mm: 0, _aten._sparse_addmm: 1, _aten.addmm: 1}
_ADDED = {_aten.add_, _aten._to_dense}


def sizes_before(func: Any, args: Any) -> list[int]:
    """Returns the bytes that an operator allocates and frees before its result.

    Args:
        func: The operator.
        args: Its arguments.
    """
    return _sorting_sizes(args[0]) if func is _aten._coalesce.default and _stored(args[0]) > 1 else []


def sizes_within(func: Any, args: Any, result: Any, processor_bytes: int) -> list[list[int]]:
    """Returns the bytes of temporary tensors on top of an operator's result, those that live together in one list.

    Args:
        func: The operator.
        args: Its arguments.
        result: Its result.
        processor_bytes: What the processor's kernel takes: for operators that torch composes of others.
    """
    packet = getattr(func, "overloadpacket", None)
    if packet is _aten._coalesce:
        return [_sorting_sizes(args[0])[:-1]]
    if packet in _ADDED:
        added = args[1] if packet is _aten.add_ and not is_sparse(args[0]) else args[0]
        if is_sparse(added) and added.layout is torch.sparse_coo and not is_sparse(result):
            return [[] if pattern_of(added).is_coalesced else _flat_sizes(added)]
    if (
        packet in _PRODUCTS
        and is_sparse(left := args[_PRODUCTS[packet]])
        and not is_sparse(args[_PRODUCTS[packet] + 1])
    ):
        zeros = [result.nbytes] if packet is _aten.mm else []
        if left.layout is not torch.sparse_coo:
            return [zeros]
        return _product_sizes(left, args[_PRODUCTS[packet] + 1], result, zeros)
    return [[processor_bytes]]


def _product_sizes(left: Any, right: Any, result: Any, zeros: list[int]) -> list[list[int]]:
    """Rows become compressed in 32 bits, and the result is computed in columns (cuda/SparseBlasLegacy.cpp)."""
    count, held = _stored(left), list(zeros)
    phases = []
    if not pattern_of(left).is_coalesced and count > 1:
        phases.append([*held, *_sorting_sizes(left)])
        stored, count = count, count_places(left)
        held += [part.nbytes // stored * count for part in parts_of(left)]
    rows = (left.shape[0] + 1) * _INT32
    phases.append([*held, rows, count * _INT32])
    is_plain = right.is_contiguous() or right.t().is_contiguous()
    phases.append([*held, rows, count * _INT32, result.nbytes, *([] if is_plain else [right.nbytes])])
    return phases


def _sorting_sizes(tensor: torch.Tensor) -> list[int]:
    """Positions and flat indices, and the copies that Thrust's merge sort takes, last (cuda/SparseCUDATensor.cu)."""
    positions = _stored(tensor) * _INT64
    return [*_flat_sizes(tensor), positions, positions, 2 * positions]


def _flat_sizes(tensor: torch.Tensor) -> list[int]:
    """Indices of several dimensions are flattened to one; of one they are used as they are."""
    return [_stored(tensor) * _INT64] if parts_of(tensor)[0].shape[0] > 1 else []


def _stored(tensor: torch.Tensor) -> int:
    """Returns how many elements a sparse tensor stores."""
    return parts_of(tensor)[-1].shape[0]
