"""Tensors whose values have left memory, and return as soon as anything reads them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from memprof.policies.swap.moves import Carrier
from memprof.policies.swap.packing import nothing

#: Where an absent tensor has its `_Absence`.
_KEY = "_memprof_absence"
#: A checkpoint may be written by a thread of its own.
_lock = threading.RLock()
_T: Any = torch.Tensor
#: What can be read of a tensor without its values.
METADATA = frozenset(
    [
        *(_T.size, _T.stride, _T.dim, _T.numel, _T.element_size, _T.is_floating_point, _T.is_complex, _T.is_contiguous),
        *(_T.grad.__set__, _T.grad.__delete__, _T.requires_grad.__set__, _T.requires_grad_, _T.register_hook),
        _T.register_post_accumulate_grad_hook,
        *(torch.is_floating_point, torch.is_complex, torch.numel, _T.__len__, _T.__hash__),
        *(
            getattr(_T, name).__get__
            for name in (
                *("shape", "dtype", "device", "ndim", "nbytes", "layout", "requires_grad", "is_leaf", "is_cuda"),
                *("grad", "grad_fn", "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "is_meta"),
            )
        ),
    ]
)


class AbsentTensor(torch.Tensor):
    """The class of a tensor while its values are out.

    The tensor remains the same object, for whoever holds it: an optimizer, a state dict, a variable of the job. Its
    implementation is replaced by one without memory. Functions of torch are called on the real one, which is put
    back before; code that calls operators past ``__torch_function__``, such as TorchScript, ends in
    ``__torch_dispatch__``; what takes the bare address of the values raises torch's own error.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch, after bringing in what it may read."""
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, AbsentTensor):
                _returned(each)
        return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub forgets the function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator on the values."""
        args, kwargs = tree_map_only(AbsentTensor, _returned, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Absence:
    """The absence of one tensor's values.

    Attributes:
        returned: The tensor, once its values are back; code of torch may still hold what stood for it.
        on_read: Called when its values return for a read.
    """

    def __init__(self, tensor: torch.Tensor, carrier: Carrier, place: Any, on_read: Callable[[], None]) -> None:
        """Frees the values of a tensor, which have been copied to a place."""
        self._carrier, self._place, self.on_read = carrier, place, on_read
        self.returned: torch.Tensor | None = None
        self._size, self._stride = tensor.size(), tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device
        self._real: Any = without_memory(tensor)
        self._exchange(tensor)
        vars(self._real).update(vars(tensor))  # of a dry run's tensor: its device
        vars(tensor)[_KEY] = self
        with torch._C.DisableTorchFunctionSubclass():
            self._real.data = nothing(self._device)

    def fetch(self) -> torch.UntypedStorage:
        """Starts the copy back in."""
        return self._carrier.fetch(self._place)

    def end(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        """Waits for the copy, and gives the tensor its values."""
        self._carrier.fetched(self._place)
        value = torch.empty(0, dtype=self._dtype, device=self._device).set_(storage, 0, self._size, self._stride)
        with torch._C.DisableTorchFunctionSubclass():
            self._real.data = value
        self._carrier.forget(self._place, storage)
        del vars(tensor)[_KEY]
        self._exchange(tensor)
        vars(self._real)[_KEY], self.returned = self, tensor
        self._real = self._place = None

    def _exchange(self, tensor: torch.Tensor) -> None:
        """Exchanges the implementations, as torch.utils.swap_tensors does for tensors without weak references."""
        torch._C._swap_tensor_impl(tensor, self._real)
        tensor.__class__, self._real.__class__ = self._real.__class__, tensor.__class__

    def __del__(self) -> None:
        """Discards values that nobody can read any more."""
        if self._place is not None:
            self._carrier.forget(self._place, None)


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same layout without memory."""
    return torch.Tensor._make_wrapper_subclass(
        AbsentTensor, tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def put_out(tensors: Sequence[torch.Tensor], carrier: Carrier, on_read: Callable[[], None]) -> None:
    """Moves tensors out that have their memory for themselves (see `is_alone`).

    Args:
        tensors: The tensors; those whose copy fails stay.
        carrier: Moves storages out and back.
        on_read: Called when a tensor has returned because something reads it.
    """
    _keep_out_of_graphs()
    with _lock:
        places = [carrier.send(each.untyped_storage()) for each in tensors]
        for tensor, place in zip(tensors, places, strict=True):
            if carrier.sent(place):
                _Absence(tensor, carrier, place, on_read)
            else:
                carrier.forget(place, None)


def bring_in(tensors: Iterable[torch.Tensor]) -> None:
    """Moves those tensors back in that are out."""
    with _lock:
        absent = {id(each): each for each in tensors if isinstance(each, AbsentTensor)}.values()
        absences = [vars(each)[_KEY] for each in absent]
        storages = [each.fetch() for each in absences]
        for tensor, absence, storage in zip(absent, absences, storages, strict=True):
            absence.end(tensor, storage)


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether nothing but its Python object holds a tensor's memory: no view, no array, no graph, no other tensor."""
    return bool(tensor._use_count() == 1 and has_one_user(tensor))  # type: ignore[attr-defined]


def has_one_user(tensor: torch.Tensor) -> bool:
    """Whether no other tensor shares a tensor's memory."""
    storage = tensor.untyped_storage()  # counts as a user, beside the tensor
    return bool(torch._C._storage_Use_Count(storage._cdata) == 2)


def _returned(absent: AbsentTensor) -> torch.Tensor:
    """Brings in a tensor for a read, and returns it."""
    with _lock:
        absence = vars(absent)[_KEY]
        tensor: torch.Tensor = absent if absence.returned is None else absence.returned
        if isinstance(tensor, AbsentTensor):
            absence = vars(tensor)[_KEY]
            bring_in([tensor])
            absence.on_read()
    return tensor


def _keep_out_of_graphs() -> None:
    """Has torch.compile run `_returned` as it is; without torch.compile, that need not be imported."""
    if "torch._dynamo" in sys.modules and not hasattr(_returned, "_torchdynamo_disable"):
        globals()["_returned"] = torch.compiler.disable(_returned)  # type: ignore[no-untyped-call]
