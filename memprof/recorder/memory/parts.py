"""The plain tensors that hold the memory of any other: indices and values of a sparse one, parts of a subclass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

#: Types of tensors that are neither lazy nor made of others: nearly all.
PLAIN = (torch.Tensor, torch.nn.Parameter)
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


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensors that hold a tensor's memory: itself, or the parts of a sparse tensor or a wrapper subclass.

    Such subclasses are DTensor, jagged tensors, and quantized ones of torchao.
    """
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        yield from holders_of(tensor)
        return
    names, _ = flatten(tensor)
    for name in names:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):  # a DTensor also lists its DeviceMesh
            yield from plain_tensors(inner)


def bytes_of(tensor: torch.Tensor) -> int:
    """Returns the bytes of the tensors that hold a tensor's memory; of a DTensor, those of all ranks' parts."""
    if type(tensor) in PLAIN or hasattr(tensor, "_local_tensor"):
        parts = parts_of(tensor)
    else:
        parts = tuple(plain_tensors(tensor))
    return sum(part.nbytes for part in parts or (tensor,))


def named_modules_of(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Module | None]]:
    """Yields a model's modules in the order of named_modules(), each once: its name, itself, and its parent.

    They are told apart by identity and no method of theirs is called: a job's may raise, or define equality.
    """
    seen: set[int] = set()
    pending: list[tuple[str, torch.nn.Module, torch.nn.Module | None]] = [("", root, None)]
    while pending:
        name, module, parent = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module, parent
        prefix = f"{name}." if name else ""
        children = [(prefix + key, child, module) for key, child in module._modules.items() if child is not None]
        pending.extend(reversed(children))


def modules_of(root: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yields a model and the modules inside it, each once."""
    return (module for _, module, _ in named_modules_of(root))


def parameters_of(root: torch.nn.Module, *, buffers: bool = False) -> Iterator[torch.Tensor]:
    """Yields a model's parameters, or its buffers, each once."""
    owned = (module._buffers if buffers else module._parameters for module in modules_of(root))
    return iter({id(tensor): tensor for own in owned for tensor in own.values() if tensor is not None}.values())


def parameter_bytes_of(module: torch.nn.Module) -> int:
    """Returns the bytes of a module's own parameters; uninitialized ones have none yet."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    with torch._C.DisableTorchFunction():  # otherwise a mode or subclass of the job's sees these reads
        return sum(bytes_of(parameter) for parameter in own if not is_lazy(parameter))
