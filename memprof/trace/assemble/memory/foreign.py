"""Memory that no tensor of torch's owns: numpy's and others', and libraries' workspaces."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from memprof.machines.card import cublas_workspace_sizes
from memprof.trace.assemble.timeline import first_rows
from memprof.trace.schema import NONE, Bools, Ints, Ops, Texts

#: Libraries by the operators that use them; torch keeps cuBLAS's workspace per thread and stream
#: (aten/src/ATen/cuda/CUDABlas.cpp, CublasHandlePool.cpp), and frees cuDNN's within the operator.
_LIBRARIES = (
    (
        re.compile(r"^aten\.(?:_?addmm|mm|bmm|baddbmm|addbmm|addmv|linear|_scaled_mm|_grouped_mm|matmul|mv|dot)"),
        "cuBLAS",
    ),
    (re.compile(r"conv|cudnn|_thnn_fused_lstm|miopen"), "cuDNN"),
    (re.compile(r"fft"), "cuFFT"),
    (re.compile(r"linalg|cholesky|lu_|svd|qr|eig|triangular"), "cuSOLVER"),
)


@dataclass(frozen=True)
class Foreign:
    """Foreign storages, by ascending address.

    Attributes:
        address: Address of each. Shape (foreign,).
        size_bytes: Size of the largest tensor seen on it.
        first: Raw operator that first returned it; NONE when it was an input before that.
        last: Raw operator that used it last.
        storage: Storage of each use; NONE for uses of torch's own memory. Shape (touches,).
        offset: Number of the first foreign storage.
    """

    address: Ints
    size_bytes: Ints
    first: Ints
    last: Ints
    storage: Ints
    offset: int

    def of_address(self, address: Ints) -> Ints:
        """Returns the storage at each address; NONE where there is none."""
        row = first_rows(self.address, address)
        return np.where(row == NONE, NONE, self.offset + row)


def find_foreign(
    raw_op: Ints, address: Ints, size_bytes: Ints, is_write: Bools, is_foreign: Bools, offset: int
) -> Foreign:
    """Groups uses of foreign memory by address: one storage lives from the first use to the last.

    Args:
        raw_op: Operator of each use. Shape (touches,).
        address: Address of its storage.
        size_bytes: Bytes of its tensor.
        is_write: Uses by the operator that returned the tensor.
        is_foreign: Uses of memory that no allocation explains.
        offset: Number of the first foreign storage.
    """
    unique, code = np.unique(address[is_foreign], return_inverse=True)
    ops = raw_op[is_foreign]
    first = np.full(len(unique), np.iinfo(np.int64).max)
    last = np.zeros(len(unique), dtype=np.int64)
    size = np.zeros(len(unique), dtype=np.int64)
    np.minimum.at(first, code, ops)
    np.maximum.at(last, code, ops)
    np.maximum.at(size, code, size_bytes[is_foreign])
    is_made = np.zeros(len(unique), dtype=np.bool_)
    is_made[code[is_write[is_foreign] & (ops == first[code])]] = True
    storage = np.full(len(address), NONE, dtype=np.int64)
    storage[is_foreign] = offset + code
    return Foreign(unique, size, np.where(is_made, first, NONE), last, storage, offset)


def name_workspaces(
    is_own: Bools, category: Texts, names: Texts, sizes: Ints, created: Ints, freed: Ints, used: Ints, ops: Ops
) -> None:
    """Labels unused storages without recorded facts as workspaces; edits categories and names in place.

    Args:
        is_own: Storages owned by the device's allocator. Shape (storages,).
        category: Their categories.
        names: Their names.
        sizes: Their bytes, as requested.
        created: Row that created each; NONE where older.
        freed: Row after which each was freed; NONE where it stays.
        used: Storages that operators use. Shape (uses,).
        ops: The operators.
    """
    is_touched = np.zeros(len(created), dtype=np.bool_)
    is_touched[used] = True
    is_unowned = is_own & ~is_touched & (names == "") & np.isin(category, ("temporary", "unknown"))
    # Memory of no tensor that outlives its operator. Memory allocated between operators is autograd's.
    is_made = is_unowned & (created != NONE) & ((freed == NONE) | (freed > created))
    is_made[is_made] = ops.kind[created[is_made]] != "allocation"
    for row in np.flatnonzero(is_made).tolist():
        operator = str(ops.name[created[row]])
        library = next((library for pattern, library in _LIBRARIES if pattern.search(operator)), "")
        category[row] = "workspace"
        names[row] = f"{library} workspace" if library else f"workspace of {operator}"
    is_older = is_unowned & (created == NONE)
    names[is_older] = np.where(freed[is_older] == NONE, "held by no Python object", "")
    # The operator that made it, which would show the library, was not recorded.
    is_cublas = is_older & (freed == NONE) & np.isin(sizes, cublas_workspace_sizes())
    category[is_cublas], names[is_cublas] = "workspace", "cuBLAS workspace"
