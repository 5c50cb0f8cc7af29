"""Identifies device memory that no tensor owns: library workspaces kept between calls."""

from __future__ import annotations

import re

import numpy as np

from memprof.machines.card import cublas_workspace_sizes
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
