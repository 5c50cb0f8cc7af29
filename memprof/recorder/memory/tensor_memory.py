"""The memory of a tensor: the plain tensors that hold it, and the address and bytes of their storages.

Storages of other memory (numpy, mapped files, shared memory) cannot be resized, but not only they: `torch.load` and
``Tensor.numpy`` fix the size of the allocator's own. What frees a storage's memory distinguishes them: its pointer's
deleter, which no API returns. It is read from the storage itself, at the place that a storage just allocated shows.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from functools import cache, partial
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
_WORDS = 8
_Storage: Any = torch.UntypedStorage  # not annotated in torch
#: Modules called with gradients on where that is not observed and their parameters, by identity, and the thread that
#: calls them; 0 for several.
_called: dict[int, tuple[weakref.ref[Any], int]] = {}


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


def note_call_elsewhere(module: torch.nn.Module) -> None:
    """Notes that this thread, which is not observed, calls a model that it may train."""
    thread = threading.get_ident()
    if _called.get(id(module), (None, -1))[1] in (thread, 0):
        return
    for each in (*modules_of(module), *parameters_of(module)):
        known = _called.get(id(each), (None, thread))[1]
        _called[id(each)] = (weakref.ref(each, partial(_forget, id(each))), thread if known == thread else 0)


def _forget(key: int, _: weakref.ref[Any]) -> None:
    _called.pop(key, None)


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter of a model that another thread has called with gradients on.

    Its backward writes `grad` without the interpreter's lock: to read that meanwhile may be a segmentation fault.
    """
    known = _called.get(id(tensor))
    return known is not None and known[1] != threading.get_ident()


def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a leaf's gradient; None for other tensors, and where it cannot be read (`is_elsewhere`)."""
    # Reading the gradient of a tensor that is not a leaf prints a warning.
    return None if is_elsewhere(tensor) or not tensor.is_leaf else tensor.grad


def parameter_bytes_of(module: torch.nn.Module) -> int:
    """Returns the bytes of a module's own parameters; uninitialized ones have none yet."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    with torch._C.DisableTorchFunction():  # otherwise a mode or subclass of the job's sees these reads
        return sum(bytes_of(parameter) for parameter in own if not is_lazy(parameter))


def storage_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns address and bytes of a tensor's storage; (0, 0) for tensors without one (sparse, meta, opaque, fake)."""
    try:
        storage = tensor.untyped_storage()
        # A FakeTensor (during compilation) reports another device; its storage is "meta", and data_ptr would warn.
        is_meta = tensor.is_meta if type(tensor) in PLAIN else storage.device.type == "meta"
        return (0, 0) if is_meta else (storage.data_ptr(), storage.nbytes())
    except (NotImplementedError, RuntimeError):
        return 0, 0


def owned_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the span of a storage owned by torch's allocator; (0, 0) for memory of numpy, shared or mapped files."""
    return _span_of(tensor, is_owned=True)


def outside_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the span of a storage in main memory that torch's allocator does not own; (0, 0) for its own."""
    return _span_of(tensor, is_owned=False)


def _span_of(tensor: torch.Tensor, *, is_owned: bool) -> tuple[int, int]:
    try:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta" or not storage.nbytes():
            return 0, 0
        return (storage.data_ptr(), storage.nbytes()) if _is_owned(storage) is is_owned else (0, 0)
    except (NotImplementedError, RuntimeError):
        return 0, 0


def _is_owned(storage: Any) -> bool:
    if storage.device.type != "cpu":
        return bool(storage.resizable())
    if storage.resizable():
        return not storage.is_shared()
    found = _deleter()
    return found is not None and _word(storage, found[0]) == found[1]


@cache
def _deleter() -> tuple[int, int] | None:
    """Returns the place of the deleter in a storage, in words, and that of torch's allocator; None if not found.

    The pointer to the memory, its deleter and the argument of this, again the pointer, follow each other (c10/core/
    StorageImpl.h, c10/util/UniqueVoidPtr.h).
    """
    trials = [_Storage(64), _Storage(64)]  # not operators, which a mode of the job's would see
    found = [
        {
            (place, _word(one, place))
            for place in range(1, _WORDS - 1)
            if _word(one, place - 1) == one.data_ptr() == _word(one, place + 1)
        }
        for one in trials
    ]
    return next(iter(found[0] & found[1]), None)


def _word(storage: Any, place: int) -> int:
    return ctypes.c_size_t.from_address(storage._cdata + ctypes.sizeof(ctypes.c_size_t) * place).value
