"""Moves a real job's optimizer state out after every update and back before the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memprof.errors import PolicyError
from memprof.policies.optimizer.one_by_one import OneByOne
from memprof.policies.optimizer.refusals import needs_whole
from memprof.policies.runtime.job import Job
from memprof.policies.runtime.per_optimizer import PerOptimizer
from memprof.policies.runtime.replaced import hook_weakly
from memprof.policies.swap.moves import Carrier
from memprof.policies.swap.packing import is_plain
from memprof.recorder.steps.inner_steps import is_inner_step
from memprof.recorder.steps.usages import needs_closure

NO_VALUES = (
    "swap: the optimizer would update a tensor made from values that were moved out at the time: a weight read by its "
    "name outside its module's forward, or another optimizer's state. Call list(model.parameters()) or state_dict() "
    "before, which bring them in, or leave swap out."
)


def swap_states(
    job: Job,
    carrier: Carrier,
    minimum_bytes: int,
    parameters: frozenset[torch.Tensor] | None = None,
    *,
    one_by_one: bool = False,
) -> None:
    """Installs hooks around the updates of all optimizers, and around saving and loading their state.

    Args:
        job: The job.
        carrier: Moves storages out and back.
        minimum_bytes: Smaller tensors stay.
        parameters: Those whose state is moved; None for all.
        one_by_one: Update one parameter at a time, with its own state in memory, instead of all with all state.

    Raises:
        PolicyError: An optimizer cannot update one parameter at a time.
    """
    if one_by_one:
        for optimizer in job.optimizers:
            if needs_closure(type(optimizer)):
                raise PolicyError(needs_whole(type(optimizer).__name__))
    for optimizer in job.optimizers:
        known = _moving.get(optimizer)
        if known is not None:  # it updates another model, too
            job.on_undo(known.add(parameters))
            job.put_around_updates(optimizer, known.around)
            continue
        states = _States(optimizer, carrier, max(minimum_bytes, 1), parameters)
        _moving.keep(job, states)
        if one_by_one:
            OneByOne(optimizer, states.around).install(job)
        else:
            job.on_undo(optimizer.register_step_pre_hook(states.before_step).remove)
        for hook in (
            optimizer.register_step_post_hook(states.after_step),
            optimizer.register_state_dict_pre_hook(states.bring_back),
            optimizer.register_load_state_dict_pre_hook(states.bring_back),
        ):
            job.on_undo(hook.remove)
        job.before_copies(optimizer, states.bring_back)
        job.put_around_updates(optimizer, states.around)
        job.on_undo(states.bring_back)
        # State may be handed to another optimizer.
        job.on_undo(hook_weakly(register_optimizer_step_pre_hook, states.check_other))


@dataclass
class _Out:
    """A state tensor that is out."""

    state: dict[str, Any]
    key: str
    place: Any
    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]


class _States:
    """The state of one optimizer, and which tensors of it are out."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        carrier: Carrier,
        minimum_bytes: int,
        parameters: frozenset[torch.Tensor] | None,
    ) -> None:
        self.optimizer = optimizer
        self._chosen = [parameters]
        self._carrier = carrier
        self._minimum_bytes = minimum_bytes
        self._out: dict[torch.Tensor, list[_Out]] = {}
        self._one_by_one = False

    def add(self, parameters: frozenset[torch.Tensor] | None) -> Callable[[], None]:
        """Moves the state of another model's parameters too.

        Args:
            parameters: Those parameters; None for all.

        Returns:
            Brings their state back in, and leaves it in.
        """
        self._chosen.append(parameters)

        def undo() -> None:
            self.bring_back()
            self._chosen.remove(parameters)

        return undo

    @contextmanager
    def around(self, parameter: torch.Tensor) -> Iterator[None]:
        """Brings in one parameter's state; after the first call, a step brings in only those with a gradient left."""
        self._one_by_one = True
        self._bring([parameter])
        try:
            yield
        finally:
            self._send([parameter])

    def before_step(self, *_: Any) -> None:
        """Brings in the state for an update of all parameters."""
        self._bring([each for each in self._out if not self._one_by_one or each.grad is not None])

    def bring_back(self, *_: Any) -> None:
        """Brings everything back in."""
        self._bring(list(self._out))

    def check_other(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Rejects updates with state of this optimizer that is out.

        Raises:
            PolicyError: Another optimizer holds such state.
        """
        if _moving.get(optimizer) is None:  # else it is brought back first
            for state in optimizer.state.values():
                require_values(state.values() if isinstance(state, dict) else ())

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Moves out every state tensor that has a storage of its own, unless a step around this one goes on."""
        if not is_inner_step(optimizer):
            self._send(list(self.optimizer.state))

    def _send(self, parameters: list[torch.Tensor]) -> None:
        leaving = []
        for parameter in parameters:
            is_chosen = any(each is None or parameter in each for each in self._chosen)
            if not is_chosen or parameter in self._out:  # a stand-in for a single number looks like the number itself
                continue
            state = self.optimizer.state.get(parameter, {})
            for key, value in state.items():
                if self._moves(value):
                    place = self._carrier.send(value.untyped_storage())
                    out = _Out(state, key, place, value.dtype, value.device, value.size(), value.stride())
                    leaving.append((parameter, out))
        for parameter, out in leaving:
            if self._carrier.sent(out.place):
                out.state[out.key] = stand_in(out.state[out.key])
                self._out.setdefault(parameter, []).append(out)
            else:
                self._carrier.forget(out.place, None)

    def _bring(self, parameters: list[torch.Tensor]) -> None:
        coming = [out for parameter in parameters for out in self._out.pop(parameter, ())]
        storages = [self._carrier.fetch(out.place) for out in coming]
        for out, storage in zip(coming, storages, strict=True):
            self._carrier.fetched(out.place)
            value = torch.empty(0, dtype=out.dtype, device=out.device)
            out.state[out.key] = value.set_(storage, 0, out.size, out.stride)
            self._carrier.forget(out.place, storage)

    def _moves(self, value: Any) -> bool:
        return (
            is_plain(value, may_be_complex=True)
            and str(value.device) == self._carrier.device
            and value.nbytes >= self._minimum_bytes
            and value.untyped_storage().nbytes() == value.nbytes
        )


#: The states that are moved, under any plan.
_moving: PerOptimizer[_States] = PerOptimizer()


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a one-element tensor expanded to the same sizes, NaN if the type has it, so that misuse shows."""
    return _element(tensor.dtype, tensor.device).expand(tensor.size())


def require_values(tensors: Iterable[Any]) -> None:
    """Checks that an update writes to no stand-in: torch's fused updates would write past its one element.

    Args:
        tensors: What the update writes to.

    Raises:
        PolicyError: One is a stand-in.
    """
    stand_ins = {element.untyped_storage()._cdata for element in elements.values()}
    for tensor in tensors:
        if is_plain(tensor, may_be_complex=True) and tensor.untyped_storage()._cdata in stand_ins:
            raise PolicyError(NO_VALUES)


#: The one element of the stand-ins of each type and device.
elements: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def _element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if (dtype, device) not in elements:
        value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        elements[dtype, device] = torch.full((), value, dtype=dtype, device=device)
    return elements[dtype, device]
