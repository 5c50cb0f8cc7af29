"""Updates each parameter as soon as backward has completed its gradient, which then goes at once."""

from __future__ import annotations

import dis
import functools
import sys
import weakref
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memprof.errors import PolicyError
from memprof.policies.optimizer.updates import Updates
from memprof.policies.optimizer.used import SECOND_BACKWARD, UsedGradient

if TYPE_CHECKING:
    from memprof.policies.job import Job


class InBackward:
    """Updates each parameter when backward has completed its gradient.

    The optimizers' own steps find no gradients afterwards and change nothing, so that hooks, schedulers and counters
    around them work as before. An optimizer that is made later, or given more parameters, updates inside backward,
    too; of several for one parameter, the one made last.
    """

    def __init__(self, updates: list[Updates], kind: type[Updates]) -> None:
        """Takes the optimizers there are.

        Args:
            updates: How each of them updates.
            kind: How one that is made later does.
        """
        self._kind = kind
        self._known: dict[int, Updates] = {id(one.optimizer): one for one in updates}
        #: By parameter: the optimizer that updates it, and the number of its group there.
        self._owners: dict[int, tuple[weakref.ref[torch.optim.Optimizer], int]] = {}
        self._hooked: dict[int, weakref.ref[torch.Tensor]] = {}
        self._updated: set[int] = set()
        self._settings: dict[int, list[dict[str, Any]]] = {}
        self._is_unreset = False
        self._caller: FrameType | None = None
        self._own: set[int] = set()
        self._is_on = True
        self._stepping: torch.optim.Optimizer | None = None
        self._job: Job | None = None

    def start(self, job: Job) -> None:
        """Puts the hooks in place."""
        self._job = job
        self._own = {id(parameter) for parameter in job.model.parameters()}
        for one in self._known.values():
            for number, group in enumerate(one.optimizer.param_groups):
                self._take(job, one.optimizer, number, group["params"])
        self._watch_groups(job)
        job.on_undo(register_optimizer_step_pre_hook(self._before_step).remove)
        job.on_undo(register_optimizer_step_post_hook(self._after_step).remove)
        job.on_undo(self._drop_used)
        job.on_undo(self._switch_off)
        self._watch_backward(job)
        self._watch_resets(job)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self._refuse_clipping(job, name)
        self._refuse_scaling(job)

    def _take(self, job: Job, optimizer: torch.optim.Optimizer, number: int, parameters: list[torch.Tensor]) -> None:
        """Has an optimizer's parameters updated inside backward."""
        for parameter in parameters:
            self._owners[id(parameter)] = weakref.ref(optimizer), number
            known = self._hooked.get(id(parameter))
            if parameter.requires_grad and parameter.is_leaf and (known is None or known() is not parameter):
                self._hooked[id(parameter)] = weakref.ref(parameter)
                hook = functools.partial(self._update, job)
                job.on_undo(parameter.register_post_accumulate_grad_hook(hook).remove)  # type: ignore[no-untyped-call]

    def _watch_groups(self, job: Job) -> None:
        """Has groups that are added later, as those of a new optimizer are, updated inside backward."""
        kind = torch.optim.Optimizer
        before = kind.add_param_group

        @functools.wraps(before)
        def add_param_group(optimizer: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
            before(optimizer, param_group)
            number = len(optimizer.param_groups) - 1
            given = optimizer.param_groups[number]["params"]
            is_known = id(optimizer) in self._known and self._known[id(optimizer)].optimizer is optimizer
            is_own = is_known or any(id(one) in self._own or id(one) in self._owners for one in given)
            if self._is_on and self._job is not None and is_own:
                self._take(self._job, optimizer, number, given)

        setattr(kind, "add_param_group", add_param_group)  # noqa: B010 - an assignment to a method is none to mypy
        job.on_undo(functools.partial(setattr, kind, "add_param_group", before))

    def _updates_of(self, job: Job, optimizer: torch.optim.Optimizer) -> Updates:
        one = self._known.get(id(optimizer))
        if one is None or one.optimizer is not optimizer:
            one = self._known[id(optimizer)] = self._kind(optimizer)
            one.prepare(job)
        return one

    def _update(self, job: Job, parameter: torch.Tensor) -> None:
        """Updates a parameter whose gradient is complete.

        Raises:
            PolicyError: It was updated with a part of its gradient before.
        """
        owner, number = self._owners[id(parameter)]
        optimizer = owner()
        if optimizer is None:  # nobody will step: the gradient stays, as it would
            return
        if id(parameter) in self._updated:
            raise PolicyError(SECOND_BACKWARD)
        if self._is_unreset:
            self._is_unreset = False
            _require_reset(self._caller)
        if id(optimizer) not in self._settings:
            self._settings[id(optimizer)] = _settings(optimizer)
        self._updated.add(id(parameter))
        one = self._updates_of(job, optimizer)
        with one.lock, job.around_update(optimizer, parameter):
            one.single(number, parameter)
        if parameter.grad is None:
            return
        # In the backward of a closure, the step that called it is to find nothing.
        parameter.grad = None if optimizer is self._stepping else UsedGradient.of(parameter)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Hides from a step what backward has updated.

        Raises:
            PolicyError: The update inside backward was not the one of this step.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        updated = [parameter for parameter in parameters if id(parameter) in self._updated]
        if any(self._owners[id(parameter)][0]() is not optimizer for parameter in updated):
            raise PolicyError(
                "Another optimizer is stepped than the one made last for its parameters, by which step-in-backward has "
                "updated them. Leave in_backward out, or give each optimizer parameters of its own."
            )
        if any(parameter.grad is not None and not isinstance(parameter.grad, UsedGradient) for parameter in updated):
            raise PolicyError(
                "Gradients were set after backward had completed them, as DistributedDataParallel does when it "
                "averages them; step-in-backward has updated without. Leave in_backward out."
            )
        used = self._settings.pop(id(optimizer), None)
        if used is not None and used != _settings(optimizer):
            raise PolicyError(
                "The optimizer's settings (such as the learning rate) were changed between backward and "
                "optimizer.step(); step-in-backward has updated with the old ones. Change them before backward."
            )
        self._stepping = optimizer
        for parameter in parameters:
            if isinstance(parameter.grad, UsedGradient):
                parameter.grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._settings.pop(id(optimizer), None)
        self._stepping = None
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._is_unreset |= bool(self._updated & own)
        self._updated -= own

    def _switch_off(self) -> None:
        """Lets everything through where jobs are undone in another order than they were made in."""
        self._is_on = False

    def _drop_used(self) -> None:
        """Leaves nothing of the job: a function of torch that another job has wrapped since may keep this object."""
        for found in self._hooked.values():
            parameter = found()
            if parameter is not None and isinstance(parameter.grad, UsedGradient):
                parameter.grad = None
        self._job = None
        for kept in (self._known, self._owners, self._hooked, self._updated, self._settings, self._own):
            kept.clear()

    def _watch_backward(self, job: Job) -> None:
        """Says why a second backward over one graph fails, and refuses gradients that are never reset."""
        before = torch.autograd.backward

        @functools.wraps(before)
        def backward(*args: Any, **kwargs: Any) -> None:
            if self._is_on and self._is_unreset and torch._C._current_graph_task_id() == -1:
                self._caller = sys._getframe(1)
            try:
                before(*args, **kwargs)
            except RuntimeError as error:
                # The weights that it needs are others by now.
                if self._is_on and self._updated and "modified by an inplace operation" in str(error):
                    raise PolicyError(SECOND_BACKWARD) from error
                raise
            finally:
                self._caller = None

        torch.autograd.backward = backward
        job.on_undo(functools.partial(setattr, torch.autograd, "backward", before))

    def _watch_resets(self, job: Job) -> None:
        """Notes that gradients were reset."""

        def wrap(before: Any) -> Any:
            @functools.wraps(before)
            def zero_grad(*args: Any, **kwargs: Any) -> None:
                self._is_unreset = False
                before(*args, **kwargs)

            return zero_grad

        for kind in (torch.optim.Optimizer, torch.nn.Module):
            before = kind.zero_grad
            setattr(kind, "zero_grad", wrap(before))  # noqa: B010 - an assignment to a method is none to mypy
            job.on_undo(functools.partial(setattr, kind, "zero_grad", before))

    def _refuse_clipping(self, job: Job, name: str) -> None:
        """Refuses a call on gradients that are gone, also of those who imported the function before."""
        function = getattr(clip_grad, name)
        while "func" not in function.__code__.co_freevars:  # another policy's
            function = function.__wrapped__
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        before = cells["func"].cell_contents

        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            if self._is_on and any(id(parameter) in self._hooked for parameter in given):
                raise PolicyError(
                    f"torch.nn.utils.{name} was called: step-in-backward cannot clip gradients, for it has used them "
                    "already. Leave in_backward out, or do not clip."
                )
            return before(given, *args, **kwargs)

        cells["func"].cell_contents = clip
        job.on_undo(lambda: setattr(cells["func"], "cell_contents", before))

    def _refuse_scaling(self, job: Job) -> None:
        scaler = torch.amp.GradScaler
        before = scaler.scale

        def scale(given: Any, outputs: Any) -> Any:
            if self._is_on and given.is_enabled():
                raise PolicyError(
                    "A GradScaler scales the loss: step-in-backward would update with scaled gradients. Use bf16, "
                    "which needs no scaling, or leave in_backward out."
                )
            return before(given, outputs)

        scaler.scale = scale  # type: ignore[method-assign, assignment]
        job.on_undo(lambda: setattr(scaler, "scale", before))


def _require_reset(frame: FrameType | None) -> None:
    """Makes sure that a job that calls no zero_grad() resets its gradients by hand.

    Raises:
        PolicyError: No function that is under way sets a ``grad``: the job adds up gradients over all its steps.
    """
    if frame is None:  # backward came by another way than torch.autograd.backward
        return
    while frame is not None:
        instructions = dis.get_instructions(frame.f_code)
        if any(each.opname == "STORE_ATTR" and each.argval == "grad" for each in instructions):
            return
        frame = frame.f_back
    raise PolicyError(
        "Gradients are not reset between optimizer.step() and the next backward: step-in-backward cannot add them up, "
        "for it has used them already. Leave in_backward out, or call zero_grad() in each step."
    )


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns the settings an update reads: plain ones, for comparing tensors would wait for the device."""
    plain = (bool, int, float, str, tuple)
    return [{k: v for k, v in group.items() if isinstance(v, plain)} for group in optimizer.param_groups]
