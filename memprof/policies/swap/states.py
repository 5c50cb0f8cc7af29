"""Moves a real job's optimizer state out after every update and back before the next."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from memprof.errors import PolicyError
from memprof.policies.optimizer.policy import needs_whole
from memprof.policies.optimizer.updates import Updates
from memprof.policies.runtime.job import Job, PerOptimizer
from memprof.policies.runtime.replaced import replace_method
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
            _OneByOne(optimizer, states.around).install(job)
        else:
            job.on_undo(optimizer.register_step_pre_hook(states.before_step).remove)
        job.on_undo(optimizer.register_step_post_hook(states.after_step).remove)
        job.put_around_updates(optimizer, states.around)
        job.on_undo(states.bring_back)


class _OneByOne:
    """Updates the parameters one by one before the optimizer's own step, which then finds no gradients.

    The own step still runs, so that whatever wraps it (schedulers, gradient scalers, gradient accumulation) and its
    hooks work as before.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, around: Callable[[torch.Tensor], AbstractContextManager[None]]
    ) -> None:
        self._updates = Updates(optimizer)
        self._around = around
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []

    def install(self, job: Job) -> None:
        """Registers the hooks of the step: updates come after the job's own pre-hooks, which may clip gradients.

        Gradients are there again before its post-hooks, which may read them.
        """
        optimizer = self._updates.optimizer
        register = optimizer.register_step_pre_hook
        before, after = register(self._before_step), optimizer.register_step_post_hook(self._after_step)
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]

        def register_inside(hook: Any) -> Any:
            handle = register(hook)
            if before.id in optimizer._optimizer_step_pre_hooks:
                optimizer._optimizer_step_pre_hooks.move_to_end(before.id)  # type: ignore[attr-defined]
            return handle

        job.on_undo(replace_method(optimizer, "register_step_pre_hook", register_inside))
        job.on_undo(before.remove)
        job.on_undo(after.remove)

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Updates every parameter that has a gradient, and hides the gradients.

        A closure is called here; the step gets one that returns the same loss.
        """
        if is_inner_step(optimizer):
            return None
        self._show()  # left by a step that ended with an exception
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        given = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            given = (optimizer, lambda: loss), {key: each for key, each in kwargs.items() if key != "closure"}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in list(group["params"]):
                if parameter.grad is not None:
                    with self._around(parameter):
                        self._updates.single(number, parameter)
                    self._hidden.append((parameter, parameter.grad))
        for parameter, _ in self._hidden:
            parameter.grad = None
        return given

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_inner_step(optimizer):
            return
        self._show()
        self._updates.end_round()

    def _show(self) -> None:
        hidden, self._hidden = self._hidden, []
        for parameter, gradient in hidden:
            if parameter.grad is None:
                parameter.grad = gradient


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
