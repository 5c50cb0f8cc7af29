"""Updates each parameter as soon as backward has completed its gradient, then frees the gradient."""

from __future__ import annotations

import dis
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memprof.errors import PolicyError
from memprof.policies.optimizer.policy import EARLY, NEVER_RESET, SCALED, SECOND_BACKWARD, SETTINGS_CHANGED, clipped
from memprof.policies.optimizer.updates import Updates, updates_of
from memprof.policies.optimizer.used import UsedGradient, UsedState
from memprof.policies.runtime.replaced import cell_of_body, hook_weakly, replace_weakly
from memprof.recorder.steps.update_hooks import is_inner_step
from memprof.recorder.steps.usages import plain_settings

if TYPE_CHECKING:
    from memprof.policies.runtime.job import Job


#: By parameter id: the one that updates it, of those of all models that share an optimizer.
_updating: weakref.WeakValueDictionary[int, InBackward] = weakref.WeakValueDictionary()


class InBackward:
    """Updates each parameter when backward has completed its gradient.

    The optimizers' own steps then find no gradients and change nothing, so hooks, schedulers and counters around them
    work as before. Optimizers created later, and parameters added later, also update inside backward; where several
    optimizers own a parameter, the last one created updates it.
    """

    def __init__(self, job: Job, updates: list[Updates], kind: type[Updates]) -> None:
        self._job = job
        self._kind = kind
        self._known: dict[int, Updates] = {id(one.optimizer): one for one in updates}
        #: By parameter id: the optimizer that updates it, and the index of its group there.
        self._owners: dict[int, tuple[weakref.ref[torch.optim.Optimizer], int]] = {}
        self._hooked: dict[int, weakref.ref[torch.Tensor]] = {}
        #: By parameter id, until the step: its version after its update.
        self._updated: dict[int, int] = {}
        self._settings: dict[int, list[dict[str, Any]]] = {}
        self._is_unreset = False
        self._caller: FrameType | None = None
        self._own: set[int] = set()
        self._stepping: torch.optim.Optimizer | None = None
        self._remove_last: Callable[[], Any] = bool

    def start(self) -> None:
        """Installs the hooks, none of which references this object: the model keeps the job, the job this object."""
        job = self._job
        job.guard(job.model)
        self._own = {id(parameter) for parameter in job.model.parameters()}
        for one in self._known.values():
            for number, group in enumerate(one.optimizer.param_groups):
                self._take(one.optimizer, number, group["params"])
        job.on_undo(hook_weakly(register_optimizer_step_pre_hook, self._before_step))
        job.on_undo(hook_weakly(register_optimizer_step_post_hook, self._after_step))
        job.on_undo(self._drop_used)
        for owner, name, method in (
            (torch.optim.Optimizer, "add_param_group", self._add_group),
            (torch.autograd, "backward", self._backward),
            (torch.optim.Optimizer, "zero_grad", self._zero_grad),
            (torch.nn.Module, "zero_grad", self._zero_grad),
            (cell_of_body(clip_grad.clip_grad_norm_), "cell_contents", self._clip),
            (cell_of_body(clip_grad.clip_grad_value_), "cell_contents", self._clip),
            (torch.amp.GradScaler, "scale", self._scale),
        ):
            job.on_undo(replace_weakly(owner, name, method))

    def _take(self, optimizer: torch.optim.Optimizer, number: int, parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            if not self._claim(parameter):
                continue
            self._owners[id(parameter)] = weakref.ref(optimizer), number
            if parameter.requires_grad and parameter.is_leaf and not self._has_hooked(parameter):
                self._hooked[id(parameter)] = weakref.ref(parameter)
                self._job.on_undo(hook_weakly(parameter.register_post_accumulate_grad_hook, self._update))

    def _has_hooked(self, parameter: torch.Tensor) -> bool:
        known = self._hooked.get(id(parameter))
        return known is not None and known() is parameter

    def _claim(self, parameter: torch.Tensor) -> bool:
        """Returns whether to update a parameter: one of another model is left to that model's job once it has one."""
        other = _updating.get(id(parameter), self)
        if id(parameter) not in self._own and other is not self and other._has_hooked(parameter):
            return False
        _updating[id(parameter)] = self
        return True

    def _add_group(self, before: Any, optimizer: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        before(optimizer, param_group)
        number = len(optimizer.param_groups) - 1
        given = optimizer.param_groups[number]["params"]
        is_known = id(optimizer) in self._known and self._known[id(optimizer)].optimizer is optimizer
        if is_known or any(id(one) in self._own or id(one) in self._owners for one in given):
            self._take(optimizer, number, given)

    def _updates_of(self, optimizer: torch.optim.Optimizer) -> Updates:
        one = self._known.get(id(optimizer))
        if one is None or one.optimizer is not optimizer:
            one = self._known[id(optimizer)] = updates_of(self._job, optimizer, self._kind)
        return one

    def _update(self, parameter: torch.Tensor) -> None:
        """Updates a parameter whose gradient is complete.

        Raises:
            PolicyError: It was already updated with a partial gradient.
        """
        if _updating.get(id(parameter)) is not self:
            return
        owner, number = self._owners[id(parameter)]
        optimizer = owner()
        if optimizer is None:  # no optimizer will step: keep the gradient
            return
        if id(parameter) in self._updated:
            raise PolicyError(SECOND_BACKWARD)
        if self._is_unreset:
            self._is_unreset = False
            _require_reset(self._caller)
        if id(optimizer) not in self._settings:
            self._settings[id(optimizer)] = plain_settings(optimizer)
        UsedState.show(optimizer)
        one = self._updates_of(optimizer)
        with one.lock, self._job.around_update(optimizer, parameter):
            one.single(number, parameter)
        self._updated[id(parameter)] = parameter._version
        if parameter.grad is None:
            return
        # In the backward of a closure, the calling step must find no gradient.
        parameter.grad = None if optimizer is self._stepping else UsedGradient.of(parameter)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Has the step's last hook hide what backward has updated: the job's own hooks must not miss gradients."""
        if is_inner_step(optimizer):
            return
        self._remove_last()
        self._remove_last = hook_weakly(optimizer.register_step_pre_hook, self._hide)
        hooks = optimizer._optimizer_step_pre_hooks
        # Those of other policies, such as the ones that move state in, run after it and see what is left to update.
        for number in [number for number, hook in hooks.items() if _is_own(hook)][:-1]:
            hooks.move_to_end(number)  # type: ignore[attr-defined]

    def _hide(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Hides the parameters that backward has updated from a step.

        Raises:
            PolicyError: The update inside backward does not match this step.
        """
        if is_inner_step(optimizer):
            return
        UsedState.show(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        updated = [parameter for parameter in parameters if id(parameter) in self._updated]
        if any(self._owners[id(parameter)][0]() is not optimizer for parameter in updated):
            raise PolicyError(
                "step-in-backward updated parameters with the optimizer created last for them, but a different "
                "optimizer is stepped. Leave in_backward out, or give each optimizer its own parameters."
            )
        if any(parameter.grad is not None and not isinstance(parameter.grad, UsedGradient) for parameter in updated):
            raise PolicyError(
                "gradients were set after backward had completed them, as DistributedDataParallel does when it "
                "averages them; step-in-backward has updated without that. Leave in_backward out."
            )
        if any(parameter._version != self._updated[id(parameter)] for parameter in updated):
            raise PolicyError(EARLY)
        used = self._settings.pop(id(optimizer), None)
        if used is not None and used != plain_settings(optimizer):
            raise PolicyError(SETTINGS_CHANGED)
        self._stepping = optimizer
        for parameter in parameters:
            if isinstance(parameter.grad, UsedGradient):
                parameter.grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_inner_step(optimizer):
            return
        self._remove_last()
        self._settings.pop(id(optimizer), None)
        known = self._known.get(id(optimizer))
        if known is not None and known.optimizer is optimizer:
            known.end_round()
        self._stepping = None
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._is_unreset |= not own.isdisjoint(self._updated)
        self._updated = {key: version for key, version in self._updated.items() if key not in own}

    def _drop_used(self) -> None:
        """Clears all used gradients, and shows all state."""
        self._remove_last()
        for one in self._known.values():
            UsedState.show(one.optimizer)
        for found in self._hooked.values():
            parameter = found()
            if parameter is not None and isinstance(parameter.grad, UsedGradient):
                parameter.grad = None

    def _backward(self, before: Any, *args: Any, **kwargs: Any) -> None:
        """Explains why a second backward over one graph fails, and rejects gradients that are never reset.

        The state of the next step must not be read before the step.
        """
        is_outermost = torch._C._current_graph_task_id() == -1
        if self._is_unreset and is_outermost:
            self._caller = sys._getframe(1)
        try:
            before(*args, **kwargs)
        except RuntimeError as error:
            # The weights it needs were updated in place.
            if self._updated and "modified by an inplace operation" in str(error):
                raise PolicyError(SECOND_BACKWARD) from error
            raise
        finally:
            self._caller = None
        for owner in {self._owners[each][0]() for each in self._updated} if is_outermost else ():
            if owner is not None and owner is not self._stepping:
                UsedState.hide(owner)

    def _zero_grad(self, before: Any, *args: Any, **kwargs: Any) -> None:
        self._is_unreset = False
        before(*args, **kwargs)

    def _clip(self, before: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(id(parameter) in self._hooked for parameter in given):
            raise PolicyError(clipped(before.__name__))
        return before(given, *args, **kwargs)

    def _scale(self, before: Any, scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        if scaler.is_enabled():
            raise PolicyError(SCALED)
        return before(scaler, outputs)


def _require_reset(frame: FrameType | None) -> None:
    """Checks that a job that never calls zero_grad() resets its gradients by hand."""
    if frame is None:  # backward was not called through torch.autograd.backward
        return
    while frame is not None:
        instructions = dis.get_instructions(frame.f_code)
        if any(each.opname == "STORE_ATTR" and each.argval == "grad" for each in instructions):
            return
        frame = frame.f_back
    raise PolicyError(NEVER_RESET)


def _is_own(hook: Any) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("memprof.")
