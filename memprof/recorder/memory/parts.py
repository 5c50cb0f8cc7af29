"""The plain tensors that hold the memory of a sparse tensor: its indices and its values."""

from __future__ import annotations

from typing import Any

import torch

#: Attribute of a sparse fake tensor: the tensors that hold its memory.
PARTS = "_memprof_parts"
_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
_NAMES: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
}


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the tensors that hold a sparse tensor's memory, its values last; none for a tensor that is not sparse.

    Args:
        tensor: A tensor, which may be fake. No dispatch mode sees how its parts are read.
    """
    kept: tuple[torch.Tensor, ...] | None = getattr(tensor, PARTS, None)
    names = _NAMES.get(tensor.layout) if kept is None else None
    if names is None:
        return kept or ()
    unseen: Any = torch._C._DisableTorchDispatch()
    with torch._C.DisableTorchFunction(), unseen:
        return tuple(getattr(tensor, name)() for name in names)


def holders_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the tensors that hold a tensor's memory: itself, or the parts of a sparse one."""
    return (tensor,) if tensor.layout is torch.strided else parts_of(tensor)
