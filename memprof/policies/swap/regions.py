"""Moves parameters in while a forward, a backward node or an update uses them, and out in between."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from memprof.policies.runtime.replaced import is_in_transform
from memprof.policies.swap.absent import METADATA, has_one_user, without_memory
from memprof.policies.swap.moves import Carrier
from memprof.policies.swap.packing import Left, Version, is_plain, marked, may_hook, unpack
from memprof.recorder.calls.torch_state import is_in_checkpoint, top_hooks

#: By the parameter's id, under any plan.
_moved: weakref.WeakValueDictionary[int, MovedParameter] = weakref.WeakValueDictionary()


def is_moved(tensor: torch.Tensor) -> bool:
    """Returns whether a plan moves a tensor, and so brings it in for updates."""
    known = _moved.get(id(tensor))
    return known is not None and known.parameter is tensor


class _AbsentParameter:
    """Base of the class of a parameter while its values are out: what reads them brings them in before."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in METADATA:
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, _AbsentParameter):
                    _present(each)
        with torch._C.DisableTorchFunctionSubclass() if func in METADATA else nullcontext():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        return _present(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _present(self).__reduce_ex__(protocol)


def _present(parameter: Any) -> Any:
    moved = _moved[id(parameter)]
    moved.is_read = True
    moved.bring_in()
    return parameter


@functools.cache
def _absent(kind: Any) -> Any:
    """Returns the class of absent parameters of a class."""
    return type(kind)(kind.__name__, (_AbsentParameter, kind), {"__slots__": (), "__module__": kind.__module__})


class MovedParameter:
    """One parameter, in memory or out.

    Attributes:
        leases: Number of saved tensors that are views of it.
        pins: Number of running forwards and updates that use it.
        is_called: Whether a forward has used it; otherwise it stays, since nothing would bring it in.
        is_held: Whether the parameter itself may have been saved: it stays until the next update.
        is_read: Whether the job read it while it was out, and may have kept a tensor that shares its memory.
        stays: Whether it is part of a traced model and must stay in memory.
    """

    def __init__(self, parameter: torch.nn.Parameter, carrier: Carrier) -> None:
        self.parameter = parameter
        self._carrier = carrier
        self._size, self._stride, self._dtype = parameter.size(), parameter.stride(), parameter.dtype
        self._place: Any = None
        self._written_version = -1
        self._coming: torch.UntypedStorage | None = None
        self._is_in = True
        self._kind: Any = type(parameter)
        self.leases = 0
        self.pins = 0
        self.is_called = self.is_held = self.is_read = self.stays = False
        self._sent: weakref.ref[torch.UntypedStorage] = weakref.ref(parameter.untyped_storage())
        _moved[id(parameter)] = self

    def start(self) -> None:
        """Starts the copy back in, where it is out."""
        if not self._is_in and self._coming is None:
            self._coming = self._carrier.fetch(self._place)

    def bring_in(self) -> None:
        """Brings it in, and waits for the copy."""
        self.start()
        if self._coming is not None:
            self._carrier.fetched(self._place)
            self.parameter.__class__ = self._kind
            value = torch.empty(0, dtype=self._dtype, device=self.parameter.device)
            self.parameter.data = value.set_(self._coming, 0, self._size, self._stride)
            self._sent = weakref.ref(self._coming)
            self._coming, self._is_in = None, True

    def forget_version(self) -> None:
        """Makes the outside copy out of date."""
        self._written_version = -1

    def may_leave(self) -> bool:
        """Returns whether nothing needs it in memory."""
        # A view of a larger storage cannot be moved out without the rest, nor memory that whoever read it shares.
        is_own = not self._is_in or self.parameter.untyped_storage().nbytes() == self.parameter.nbytes
        is_own = is_own and not (self.is_read and self._is_in and not has_one_user(self.parameter))
        return self.is_called and is_own and not (self.pins or self.is_held or self.stays)

    def is_written(self) -> bool:
        """Returns whether the outside copy is up to date."""
        is_same = not self._is_in or self._sent() is self.parameter.untyped_storage()
        return self._place is not None and is_same and self._written_version == self.parameter._version

    def send(self) -> None:
        """Starts the copy out unless the outside copy is up to date."""
        if self._is_in and self.may_leave() and not self.is_written():
            self._forget()
            parameter = self.parameter
            self._size, self._stride, self._dtype = parameter.size(), parameter.stride(), parameter.dtype
            self._sent = weakref.ref(parameter.untyped_storage())
            self._place = self._carrier.send(parameter.untyped_storage())

    def put_out(self) -> None:
        """Moves it out, and waits for the copy, where nothing needs it in memory."""
        if not self.may_leave():
            return
        self.send()
        if self._is_in and self._carrier.sent(self._place):
            self._written_version = self.parameter._version
            with torch.inference_mode(False):  # torch would call the wrapper's operators
                self.parameter.data = without_memory(self.parameter)
            self.parameter.__class__ = _absent(self._kind)
            self._is_in = False

    def _forget(self) -> None:
        if self._place is not None:
            self._carrier.forget(self._place, None)
            self._place = None


class Region:
    """Parameters that are moved in and out together."""

    def __init__(self, parameters: Iterable[MovedParameter]) -> None:
        self._parameters = dict.fromkeys(parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def __contains__(self, parameter: MovedParameter) -> bool:
        return parameter in self._parameters

    def bring_in(self, *_: Any) -> None:
        """Brings them in; the copies run one after another."""
        for parameter in self._parameters:
            parameter.start()
        for parameter in self._parameters:
            parameter.bring_in()

    def pin(self, *_: Any) -> None:
        """Brings them in and keeps them."""
        self.bring_in()
        for parameter in self._parameters:
            parameter.pins += 1

    def unpin(self, *_: Any) -> None:
        """Ends a pin, and moves out those without another."""
        for parameter in self._parameters:
            parameter.pins -= 1
        for parameter in self._parameters:
            parameter.send()
        for parameter in self._parameters:
            parameter.put_out()

    def let_go(self) -> None:
        """Ends the pin of an update, which has changed them."""
        for parameter in self._parameters:
            parameter.is_held = False
            if parameter.parameter.grad is not None:  # a fused update does not increment the version
                parameter.forget_version()
        self.unpin()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keeps the parameters in memory; what autograd saves of them meanwhile is brought in again for backward."""
        if is_in_transform():  # it saves the parameters themselves: they stay until the next forward
            with torch._C._DisableFuncTorch():
                self.bring_in()
            yield
            return
        self.pin()
        for parameter in self._parameters:
            parameter.is_called = True
            parameter.stays |= torch._C._get_tracing_state() is not None
        try:
            if may_hook():
                with saved_tensors_hooks(self._pack, unpack):
                    yield
            else:
                self._hold()
                yield
        finally:
            self.unpin()

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the forward of a module whose parameters these are."""

        @functools.wraps(forward)
        def fetching(*args: Any, **kwargs: Any) -> Any:
            with self.in_use():
                return forward(*args, **kwargs)

        return marked(fetching)

    def wrap_inside(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the innermost forward of a module that is called outside the forward above.

        A checkpoint between the two runs it again in backward, and scripts call a module inside the chosen one.
        """

        @functools.wraps(forward)
        def fetching(*args: Any, **kwargs: Any) -> Any:
            if all(parameter.pins for parameter in self._parameters):
                return forward(*args, **kwargs)
            with self.in_use():
                return forward(*args, **kwargs)

        return fetching

    def _hold(self) -> None:
        """Keeps until the update what autograd saves itself, without a lease."""
        if not torch.is_grad_enabled():
            return
        leased = _leased()
        # A checkpoint drops what forward saves. Of its recompute it keeps detached tensors, which hold the memory
        # themselves, but those that need no gradient as they are.
        is_again = is_in_checkpoint() and torch._C._current_graph_task_id() != -1
        if is_in_checkpoint() and not is_again:
            return
        for parameter in self._parameters:
            is_detached = is_again and parameter.parameter.requires_grad
            parameter.is_held |= parameter not in leased and not is_detached

    def _pack(self, tensor: torch.Tensor) -> _Lease | Left:
        if is_plain(tensor):
            storage = tensor.untyped_storage()
            for parameter in self._parameters:
                if parameter.parameter.untyped_storage() is storage:
                    return _Lease(tensor, parameter)
        return Left(tensor)


def _leased() -> Region | tuple[()]:
    """Returns the parameters that are saved as leases here: those of the called module's region."""
    hooks = top_hooks()
    region = None if hooks is None else getattr(hooks[0], "__self__", None)
    return region if isinstance(region, Region) else ()


class _Lease:
    """A view of a parameter that backward will read; when the last one is gone, the parameter is moved out."""

    __slots__ = ("_offset", "_parameter", "_size", "_stride", "_version")

    def __init__(self, tensor: torch.Tensor, parameter: MovedParameter) -> None:
        self._parameter = parameter
        self._version = Version(tensor, keeps_memory=False)
        self._offset, self._size, self._stride = tensor.storage_offset(), tensor.size(), tensor.stride()
        parameter.leases += 1

    def unpack(self) -> torch.Tensor:
        self._version.check()
        self._parameter.bring_in()
        return self._parameter.parameter.detach().as_strided(self._size, self._stride, self._offset)

    def __del__(self) -> None:
        self._parameter.leases -= 1
        if not self._parameter.leases and self._parameter.is_written():
            self._parameter.put_out()
