"""Moves a real job's optimizer state out after every update and back before the next."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from memprof.errors import PolicyError
from memprof.policies.optimizer.one_by_one import OneByOne
from memprof.policies.optimizer.policy import needs_whole
from memprof.policies.runtime.job import Job, PerOptimizer
from memprof.policies.swap.absent import bring_in, is_alone, put_out
from memprof.policies.swap.moves import Carrier
from memprof.policies.swap.packing import is_plain
from memprof.recorder.memory.inventory import tensors_in
from memprof.recorder.steps.update_hooks import is_inner_step
from memprof.recorder.steps.usages import needs_closure, state_of

SHARED = (
    "swap: optimizer state stays in memory while a view, an array or a graph of the job shares it: the peak may exceed "
    "the prediction."
)


def swap_states(
    job: Job,
    carrier: Carrier,
    minimum_bytes: int,
    parameters: frozenset[torch.Tensor] | None = None,
    *,
    one_by_one: bool = False,
) -> None:
    """Moves the state of all optimizers out after their updates, and back in before them and when it is read.

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
        states = _States(job, optimizer, carrier, max(minimum_bytes, 1), parameters)
        _moving.keep(job, states)
        if one_by_one:
            OneByOne(optimizer, states.around).install(job)
        else:
            job.on_undo(optimizer.register_step_pre_hook(states.before_step).remove)
        job.on_undo(optimizer.register_step_post_hook(states.after_step).remove)
        job.put_around_updates(optimizer, states.around)
        job.on_undo(states.bring_back)


class _States:
    """The state of one optimizer: out between updates, except for what the job has read."""

    def __init__(
        self,
        job: Job,
        optimizer: torch.optim.Optimizer,
        carrier: Carrier,
        minimum_bytes: int,
        parameters: frozenset[torch.Tensor] | None,
    ) -> None:
        self.optimizer = optimizer
        self._note = weakref.WeakMethod(job.note)
        self._chosen = [parameters]
        self._carrier = carrier
        self._minimum_bytes = minimum_bytes
        #: What has left, by id; it may no longer be in the optimizer's state.
        self._gone: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._one_by_one = False
        self._before_call: RemovableHandle | None = None

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
        bring_in(self._of([parameter]))
        try:
            yield
        finally:
            self._send([parameter])

    def before_step(self, *_: Any) -> None:
        """Brings in the state for an update of all parameters."""
        self._end_reading()
        known = state_of(self.optimizer)
        bring_in(self._of(p for p in known if not self._one_by_one or getattr(p, "grad", p) is not None))

    def bring_back(self) -> None:
        """Brings everything back in."""
        self._end_reading()
        bring_in(list(self._gone.values()))

    def after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Moves out every state tensor that has a storage of its own, unless a step around this one goes on."""
        if not is_inner_step(optimizer):
            self._leave()

    def _read(self) -> None:
        """Has what the job reads between updates leave again when it next calls a module."""
        if self._before_call is None:
            self._before_call = register_module_forward_pre_hook(self._leave)

    def _leave(self, *_: Any) -> None:
        self._end_reading()
        self._send(list(state_of(self.optimizer)))

    def _end_reading(self) -> None:
        if self._before_call is not None:
            self._before_call.remove()
            self._before_call = None

    def _send(self, parameters: list[torch.Tensor]) -> None:
        chosen = [p for p in parameters if any(each is None or p in each for each in self._chosen)]
        movable = [each for each in self._of(chosen) if self._moves(each)]
        leaving = [each for each in movable if is_alone(each)]
        note = self._note()
        if len(leaving) < len(movable) and note is not None:
            note(SHARED)
        put_out(leaving, self._carrier, self._read)
        self._gone.update((id(each), each) for each in leaving)

    def _of(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the state tensors of parameters, once each, without making entries for those that have none."""
        known = state_of(self.optimizer)
        states = [known[each] for each in parameters if each in known]
        return list({id(each): each for each in tensors_in(states)}.values())

    def _moves(self, value: torch.Tensor) -> bool:
        return (
            is_plain(value, may_be_complex=True)
            and str(value.device) == self._carrier.device
            and value.nbytes >= self._minimum_bytes
            and value.untyped_storage().nbytes() == value.nbytes
        )


#: The states that are moved, under any plan.
_moving: PerOptimizer[_States] = PerOptimizer()
