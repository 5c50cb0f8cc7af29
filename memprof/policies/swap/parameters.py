"""Moves a real job's parameters in around their modules' forward and backward and the update, and out in between."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memprof.errors import PolicyError
from memprof.policies.runtime.job import Job
from memprof.policies.runtime.own_types import is_in_transform
from memprof.policies.runtime.replaced import hook_weakly
from memprof.policies.swap.casts import bring_in_for_casts
from memprof.policies.swap.moves import Carrier
from memprof.policies.swap.packing import (
    Left,
    Version,
    callable_modules,
    is_plain,
    marked,
    may_hook,
    require_unhooked,
    top_hooks,
    unpack,
)
from memprof.policies.swap.readers import bring_in_for_readers
from memprof.policies.swap.states import stand_in


def swap_parameters(job: Job, names: Iterable[str], carrier: Carrier, minimum_bytes: int) -> None:
    """Wraps the chosen modules, and hooks the optimizers and the saving and loading of the modules' state.

    Raises:
        PolicyError: No parameter can be moved.
    """
    chosen = callable_modules(job, names)
    require_unhooked(job.model, chosen)
    owned = _movable(job, chosen, carrier, max(minimum_bytes, 1))
    if not owned:
        raise PolicyError(
            f"No unshared parameter of the chosen modules has {minimum_bytes:,} bytes or more; choose other modules "
            "or a smaller minimum_bytes."
        )
    parameters = {id(parameter): _Parameter(parameter, carrier) for parameter in owned}
    for module in chosen:
        region = _Region(parameters[id(p)] for p in module.parameters() if id(p) in parameters)
        if region:
            job.wrap_forward(module, region.wrap)
            save: Any = module.register_state_dict_pre_hook(region.bring_in)  # type: ignore[no-untyped-call]
            load: Any = module.register_load_state_dict_pre_hook(region.bring_in)  # type: ignore[no-untyped-call]
            job.hide_hook(module, "_state_dict_pre_hooks", save)
            job.hide_hook(module, "_load_state_dict_pre_hooks", load)
    for module in job.model.modules():
        own = _Region(parameters[id(p)] for p in module.parameters(recurse=False) if id(p) in parameters)
        if own:
            job.before_copies(module, own.bring_in)
            bring_in_for_casts(job, module, own.bring_in)
    bring_in_for_readers(job, {key: each.bring_in for key, each in parameters.items()})
    everything = _Region(parameters.values())
    updates = _Updates(parameters)
    # Hooks on all optimizers, because the job may create another one later.
    job.on_undo(hook_weakly(register_optimizer_step_pre_hook, updates.before_step))
    job.on_undo(hook_weakly(register_optimizer_step_post_hook, updates.after_step))
    job.put_around_updates(None, updates.around)
    job.on_undo(everything.bring_in)
    job.notes.append(
        "swap: moved parameters read as NaN outside their modules' forward and backward and the update; "
        "state_dict(), parameters() and named_parameters() bring them in"
    )


class _Parameter:
    """One parameter, in memory or out.

    Attributes:
        leases: Number of saved tensors that are views of it.
        pins: Number of running forwards and updates that use it.
        is_called: Whether a forward has used it; otherwise it stays, since nothing would bring it in.
        is_held: Whether the parameter itself may have been saved: it stays until the next update.
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
        self._stand_in_id = -1
        self.leases = 0
        self.pins = 0
        self.is_called = self.is_held = self.stays = False
        self._sent: weakref.ref[torch.UntypedStorage] = weakref.ref(parameter.untyped_storage())

    def start(self) -> None:
        if not self._is_in and self.parameter.untyped_storage()._cdata != self._stand_in_id:
            # The job has assigned other data meanwhile, through .data.
            self._forget()
            self._coming, self._is_in = None, True
        if not self._is_in and self._coming is None:
            self._coming = self._carrier.fetch(self._place)

    def bring_in(self) -> None:
        self.start()
        if self._coming is not None:
            self._carrier.fetched(self._place)
            value = torch.empty(0, dtype=self._dtype, device=self.parameter.device)
            self.parameter.data = value.set_(self._coming, 0, self._size, self._stride)
            self._sent = weakref.ref(self._coming)
            self._coming, self._is_in = None, True

    def forget_version(self) -> None:
        self._written_version = -1

    def may_leave(self) -> bool:
        # A view of a larger storage cannot be moved out without the rest.
        is_own = self.parameter.untyped_storage().nbytes() == self.parameter.nbytes or not self._is_in
        return self.is_called and is_own and not (self.pins or self.is_held or self.stays)

    def is_written(self) -> bool:
        is_same = self._sent() is self.parameter.untyped_storage() or not self._is_in
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
        if not self.may_leave():
            return
        self.send()
        if self._is_in and self._carrier.sent(self._place):
            self._written_version = self.parameter._version
            self.parameter.data = stand_in(self.parameter.data)
            self._stand_in_id = self.parameter.untyped_storage()._cdata
            self._is_in = False

    def _forget(self) -> None:
        if self._place is not None:
            self._carrier.forget(self._place, None)
            self._place = None


class _Region:
    """Parameters that are moved in and out together."""

    def __init__(self, parameters: Iterable[_Parameter]) -> None:
        self._parameters = dict.fromkeys(parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def __contains__(self, parameter: _Parameter) -> bool:
        return parameter in self._parameters

    def bring_in(self, *_: Any) -> None:
        for parameter in self._parameters:
            parameter.start()
        for parameter in self._parameters:
            parameter.bring_in()

    def pin(self, *_: Any) -> None:
        self.bring_in()
        for parameter in self._parameters:
            parameter.pins += 1

    def unpin(self, *_: Any) -> None:
        for parameter in self._parameters:
            parameter.pins -= 1
        for parameter in self._parameters:
            parameter.send()
        for parameter in self._parameters:
            parameter.put_out()

    def let_go(self) -> None:
        for parameter in self._parameters:
            parameter.is_held = False
            if parameter.parameter.grad is not None:  # a fused update does not increment the version
                parameter.forget_version()
        self.unpin()

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def fetching(*args: Any, **kwargs: Any) -> Any:
            if is_in_transform():  # it saves the parameters themselves: they stay until the next forward
                with torch._C._DisableFuncTorch():
                    self.bring_in()
                return forward(*args, **kwargs)
            self.pin()
            for parameter in self._parameters:
                parameter.is_called = True
                parameter.stays |= torch._C._get_tracing_state() is not None
            try:
                if not may_hook():
                    leased = _leased()
                    for parameter in self._parameters:
                        parameter.is_held |= torch.is_grad_enabled() and parameter not in leased
                    return forward(*args, **kwargs)
                with saved_tensors_hooks(self._pack, unpack):
                    return forward(*args, **kwargs)
            finally:
                self.unpin()

        return marked(fetching)

    def _pack(self, tensor: torch.Tensor) -> _Lease | Left:
        if is_plain(tensor):
            storage = tensor.untyped_storage()
            for parameter in self._parameters:
                if parameter.parameter.untyped_storage() is storage:
                    return _Lease(tensor, parameter)
        return Left(tensor)


def _leased() -> _Region | tuple[()]:
    """Returns the parameters that are saved as leases here: those of the called module's region."""
    hooks = top_hooks()
    region = None if hooks is None else getattr(hooks[0], "__self__", None)
    return region if isinstance(region, _Region) else ()


class _Updates:
    """Parameters that are brought in while an optimizer updates them."""

    def __init__(self, parameters: dict[int, _Parameter]) -> None:
        self._parameters = parameters
        self._pinned = _Region([])
        self._one_by_one = False

    @contextmanager
    def around(self, parameter: torch.Tensor) -> Iterator[None]:
        """Brings one parameter in; after the first call, a step brings in only those that still have a gradient."""
        self._one_by_one = True
        own = self._parameters.get(id(parameter))
        region = _Region([] if own is None else [own])
        region.pin()
        try:
            yield
        finally:
            region.let_go()

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Brings in the parameters for an update of all."""
        self._pinned.unpin()  # left by an update that ended with an exception
        given = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._parameters]
        needed = [p for p in given if not self._one_by_one or is_plain(p.grad)]
        self._pinned = _Region([self._parameters[id(p)] for p in needed])
        self._pinned.pin()

    def after_step(self, *_: Any) -> None:
        """Releases them."""
        pinned, self._pinned = self._pinned, _Region([])
        pinned.let_go()


class _Lease:
    """A view of a parameter that backward will read; when the last one is gone, the parameter is moved out."""

    __slots__ = ("_offset", "_parameter", "_size", "_stride", "_version")

    def __init__(self, tensor: torch.Tensor, parameter: _Parameter) -> None:
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


def _movable(job: Job, chosen: list[torch.nn.Module], carrier: Carrier, minimum_bytes: int) -> list[torch.nn.Parameter]:
    """Returns parameters of the chosen modules that no other module shares and that have a storage of their own."""
    inside = {id(module) for top in chosen for module in top.modules()}
    others = (module for module in job.model.modules() if id(module) not in inside)
    shared = {id(p) for module in others for p in module.parameters(recurse=False)}
    found = {id(p): p for top in chosen for p in top.parameters()}
    return [
        p
        for key, p in found.items()
        if key not in shared
        and is_plain(p)
        and str(p.device) == carrier.device
        and p.nbytes >= minimum_bytes
        and p.untyped_storage().nbytes() == p.nbytes
    ]
