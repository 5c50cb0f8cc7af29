"""Packs tensors that autograd saves while chosen modules run, one record per storage, and unpacks them as views."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from memprof.errors import PolicyError
from memprof.policies.runtime.forwards import outermost_layer
from memprof.policies.runtime.job import Effect, Job
from memprof.policies.runtime.job_traits import require_eager, step_aside_where_forbidden
from memprof.policies.runtime.replaced import OWN_TYPES, is_in_transform
from memprof.policies.swap.records import NEVER_CALLED, OVERLAP
from memprof.recorder.calls.torch_state import top_hooks

#: Clause on a policy that replaces saved tensors and has replaced none.
NOTHING_TAKEN = "it has taken no saved tensor, as none is as large as it says, or hooks of the job took them"
_MARK = "_memprof_handles_saved_tensors"


class Record(Protocol):
    """One storage held on behalf of autograd."""

    original: weakref.ref[torch.UntypedStorage]

    def take_again(self, storage: torch.UntypedStorage) -> None:
        """Copies the storage again, since its bytes may have changed."""
        ...

    def restored(self) -> torch.UntypedStorage:
        """Returns its bytes; the same storage for all callers while one of them holds it."""
        ...


class Keeper(Protocol):
    """Stores storages and returns records for them."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Returns whether to take a saved tensor."""
        ...

    def take(self, tensor: torch.Tensor) -> Record:
        """Takes the whole storage of a tensor."""
        ...

    def flush(self) -> None:
        """Called when the outermost forward has ended."""
        ...


class Version:
    """Snapshot of a tensor's version counter; PyTorch does not check versions under hooks."""

    __slots__ = ("_counter", "_device", "_dtype", "_expected", "_size")

    def __init__(self, tensor: torch.Tensor, *, keeps_memory: bool) -> None:
        self._expected = tensor._version
        self._dtype, self._device, self._size = tensor.dtype, tensor.device, tensor.size()
        self._counter = tensor
        if not keeps_memory:
            self._counter = tensor.detach()  # shares the counter,
            self._counter.data = nothing(tensor.device)  # and keeps it when redirected to other memory

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor shares the counter and the counter is unchanged."""
        found = self._counter._version
        if found != self._expected or tensor._version != found:
            return False
        with torch.autograd._unsafe_preserve_version_counter(tensor):  # type: ignore[attr-defined]  # no stub names it
            torch.autograd.graph.increment_version(tensor)
            return bool(self._counter._version != found)

    def check(self) -> None:
        """Raises PyTorch's own error if the tensor was changed in place since."""
        found = self._counter._version
        if found != self._expected:
            kind = torch.empty(0, dtype=self._dtype, device=self._device).type()
            raise RuntimeError(  # the exact message of PyTorch without hooks
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{kind} {list(self._size)}] is at version {found}; expected version {self._expected} instead. Hint: "
                "enable anomaly detection to find the operation that failed to compute its gradient, with "
                "torch.autograd.set_detect_anomaly(True)."
            )


@functools.cache
def nothing(device: torch.device) -> torch.Tensor:
    """Returns a tensor without elements, for another to point to instead of its memory."""
    return torch.empty(0, device=device)


class _Packed:
    """A view of a record's storage."""

    __slots__ = ("_attributes", "_device", "_dtype", "_offset", "_record", "_size", "_stride", "_type", "_version")

    def __init__(self, tensor: torch.Tensor, record: Record, saved: torch.Tensor) -> None:
        """Stores where the bytes are.

        Args:
            tensor: The plain tensor that was taken.
            record: Its storage.
            saved: What autograd saved: the tensor, or one of a subclass with the same memory.
        """
        self._record = record
        self._type = None if saved is tensor else type(saved)
        self._attributes = {} if saved is tensor else dict(vars(saved))
        self._version = Version(tensor, keeps_memory=False)
        self._dtype, self._device = tensor.dtype, tensor.device
        self._offset, self._size, self._stride = tensor.storage_offset(), tensor.size(), tensor.stride()

    def unpack(self) -> torch.Tensor:
        self._version.check()
        storage = self._record.restored()
        view = torch.empty(0, dtype=self._dtype, device=self._device)
        view = view.set_(storage, self._offset, self._size, self._stride)
        if self._type is None:
            return view
        with torch._C.DisableTorchFunctionSubclass():
            typed = view.as_subclass(self._type)
        vars(typed).update(self._attributes)
        return typed


class Left:
    """A tensor that is not moved.

    An operator's output holds the node that made it. If that node saves it, the two form a reference cycle, which is
    never freed if backward does not reach it; so a detached tensor is held.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        is_known = is_plain(tensor)
        if type(tensor) is torch.Tensor:  # tensors of a dry run, which have no memory, are kept unchanged
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                tensor = tensor if tensor.is_leaf else tensor.detach()
        self._tensor = tensor
        self._version = Version(tensor, keeps_memory=True) if is_known else None

    def unpack(self) -> torch.Tensor:
        """Returns the tensor."""
        if self._version is not None:
            self._version.check()
        return self._tensor


class SavedTensors:
    """Hooks that pass the saved tensors of a job's chosen modules to a keeper.

    Parameters, buffers and the model's arguments stay, because others hold them anyway. So do tensors that are not
    plain strided memory. Regions with their own hooks (activation checkpointing, the job's own) are left to those.
    """

    def __init__(self, model: torch.nn.Module, keeper: Keeper, effect: Effect) -> None:
        self._effect = effect
        self._model = model
        self._keeper = keeper
        self._records: weakref.WeakValueDictionary[tuple[int, torch.dtype], Any] = weakref.WeakValueDictionary()
        self._versions: weakref.WeakKeyDictionary[Any, Version] = weakref.WeakKeyDictionary()
        self._owned: set[int] = set()
        self._of_thread = threading.local()

    def install(self, job: Job, names: Iterable[str]) -> None:
        """Wraps the forward of the chosen modules, and of the root.

        Raises:
            PolicyError: Another policy has hooks there, they are compiled, or none can be called; nothing was wrapped.
        """
        names = list(names)
        chosen = callable_modules(job, names)
        require_unhooked(job.model, chosen)
        require_eager(job, names, "replacing saved tensors")
        step_aside_where_forbidden()
        # Nested ones are wrapped too: the outer one may never be called itself.
        for module in chosen:
            job.wrap_forward(module, self._region)
        job.wrap_forward(job.model, self._outermost)

    def _region(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def packing(*args: Any, **kwargs: Any) -> Any:
            self._effect.is_tried = True
            if not may_hook():
                return forward(*args, **kwargs)
            with saved_tensors_hooks(self._pack, unpack):
                return forward(*args, **kwargs)

        return marked(self._outermost(packing))

    def _outermost(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a forward so that the outermost one records what stays, and flushes at its end."""

        @functools.wraps(forward)
        def noting(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._of_thread, "is_inside", False) or is_in_transform():
                return forward(*args, **kwargs)
            self._of_thread.is_inside = True
            owned = (*self._model.parameters(), *self._model.buffers(), *tree_leaves((args, kwargs)))
            plain = [plain_alias(t) for t in owned]
            self._owned = {t.untyped_storage()._cdata for t in plain if t is not None}
            try:
                return forward(*args, **kwargs)
            finally:
                self._of_thread.is_inside = False
                self._keeper.flush()

        return noting

    def _pack(self, saved: torch.Tensor) -> _Packed | Left:
        tensor = plain_alias(saved)
        if tensor is None or tensor.untyped_storage()._cdata in self._owned or not self._keeper.takes(tensor):
            return Left(saved)
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor.dtype
        record = self._records.get(key)
        if record is None or record.original() is not storage:
            self._effect.is_done = True
            self._records[key] = record = self._keeper.take(tensor)
            self._versions[record] = Version(tensor, keeps_memory=False)
        elif not self._versions[record].is_of(tensor):
            # Its bytes were changed in place, or may have been: unsafe_chunk creates tensors of one storage with
            # separate counters. Readers of the changed tensor get an error anyway; for all others later bytes are
            # equivalent.
            record.take_again(storage)
            self._versions[record] = Version(tensor, keeps_memory=False)
        return _Packed(tensor, record, saved)


def plain_alias(value: Any) -> torch.Tensor | None:
    """Returns a plain tensor of a value's memory and version counter, the value itself where it is one.

    Subclasses without operators of their own, such as MONAI's MetaTensor and fastai's TensorImage, have plain memory.

    Returns:
        None if the value has no plain strided memory.
    """
    if is_plain(value):
        return value  # type: ignore[no-any-return]  # is_plain has seen that it is a tensor
    if not isinstance(value, torch.Tensor):
        return None
    if _operators(type(value)) is not _operators(FakeTensor if isinstance(value, FakeTensor) else torch.Tensor):
        return None
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        alias = torch.Tensor.detach(value)  # the class may have a method of its own
    return alias if is_plain(alias) else None


def _operators(kind: type[torch.Tensor]) -> Any:
    """Returns the function that runs operators on tensors of a class."""
    return getattr(kind.__torch_dispatch__, "__func__", kind.__torch_dispatch__)


def callable_modules(job: Job, names: Iterable[str]) -> list[torch.nn.Module]:
    """Returns modules of a job that have a forward, unlike nn.ModuleList.

    Raises:
        PolicyError: No module has one.
    """
    modules, names = job.modules_named(), list(names)
    found = [modules[name] for name in names if type(modules[name]).forward is not torch.nn.Module.forward]
    if not found:
        raise PolicyError(NEVER_CALLED.format(name=names[0], holds=f"{names[0]}.*"))
    return found


def unpack(packed: _Packed | Left) -> torch.Tensor:
    """Returns the saved tensor to autograd."""
    return packed.unpack()


def marked(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a forward that handles saved tensors while it runs; functools.wraps preserves the mark."""
    forward.__dict__[_MARK] = True
    return forward


def require_unhooked(root: torch.nn.Module, chosen: Iterable[torch.nn.Module]) -> None:
    """Checks that no module in or around the chosen ones is marked.

    Raises:
        PolicyError: One is marked.
    """
    hooked = [module for module in root.modules() if getattr(outermost_layer(module), _MARK, False)]
    around = {id(inner): True for module in hooked for inner in module.modules()}
    inside = {id(module) for module in hooked}
    if any(id(module) in around or any(id(inner) in inside for inner in module.modules()) for module in chosen):
        raise PolicyError(OVERLAP)


def may_hook() -> bool:
    """Returns whether hooks may be installed here and none are active."""
    is_enabled = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", lambda: True)
    return bool(is_enabled()) and top_hooks() is None and not is_in_transform()


def is_plain(value: Any, *, may_be_complex: bool = False) -> bool:
    """Returns whether a value is a tensor of plain strided memory."""
    is_complex = isinstance(value, torch.Tensor) and value.is_complex()
    if is_complex and (not may_be_complex or value.is_conj()):
        return False
    return (
        isinstance(value, torch.Tensor)
        and (type(value) in OWN_TYPES or isinstance(value, (torch.nn.Parameter, torch.nn.Buffer)))
        and value.layout is torch.strided
        and not (value.is_nested or value.is_quantized or value.is_neg() or value.is_meta)
    )
