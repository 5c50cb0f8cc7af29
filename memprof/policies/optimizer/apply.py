"""Applies the optimizer policy to a job: state, update loop, and when updates run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from memprof.errors import PolicyError
from memprof.policies.optimizer.in_backward import InBackward
from memprof.policies.optimizer.policy import DISTRIBUTED, FUSED_SGD, IN_HOST_MEMORY, NOT_FUSED, needs_whole, no_form
from memprof.policies.optimizer.updates import EightBitUpdates, HostUpdates, Updates, updates_of
from memprof.recorder.steps.usages import has_form, needs_closure, takes_fused

if TYPE_CHECKING:
    from memprof.policies.optimizer.policy import OptimizerPolicy
    from memprof.policies.runtime.job import Job

_FLAGS = {
    "loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}


def apply(job: Job, policy: OptimizerPolicy) -> None:
    """Changes every optimizer of the job.

    Raises:
        PolicyError: The job has no optimizer, or one of them does not support the policy.
    """
    job.require_optimizer("the optimizer policy")
    for optimizer in job.optimizers:
        _check(job, optimizer, policy)
    kind = {"": Updates, "host": HostUpdates, "8bit": EightBitUpdates}[policy.state]
    updates = []
    effect = job.expect(policy.describe(), f"the optimizer's updates are {policy.loop} already")
    effect.is_tried, effect.is_done = True, bool(policy.state or policy.in_backward)
    for optimizer in job.optimizers:
        updates.append(updates_of(job, optimizer, kind))
        if policy.loop:
            effect.is_done |= not all(group.get(policy.loop) for group in optimizer.param_groups)
            _set_loop(job, updates[-1], policy.loop)
    if policy.in_backward:
        InBackward(job, updates, kind).start()
        job.notes.append("Gradients are freed inside backward, where each parameter is updated.")


def _check(job: Job, optimizer: torch.optim.Optimizer, policy: OptimizerPolicy) -> None:
    kind = type(optimizer).__name__
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if policy.state == "host" and all(parameter.device.type == "cpu" for parameter in parameters):
        raise PolicyError(IN_HOST_MEMORY)
    is_short = any(each.element_size() == 2 and each.device.type == "cpu" for each in parameters)
    if policy.loop == "fused" and is_short and isinstance(optimizer, torch.optim.SGD):
        raise PolicyError(FUSED_SGD)
    if policy.loop and not has_form(optimizer, "fused" if policy.loop == "fused" else "foreach"):
        raise PolicyError(no_form(kind, policy.loop))
    numbers = [value for group in optimizer.param_groups for value in (group.get("lr"), *group.get("betas", ()))]
    is_captured = all(group.get("capturable") for group in optimizer.param_groups)
    if policy.loop == "foreach" and not is_captured and any(isinstance(each, torch.Tensor) for each in numbers):
        raise PolicyError(f"the foreach form of {kind} takes no learning rate that is a tensor; leave loop out.")
    is_on_host = all(parameter.device.type == "cpu" for parameter in parameters)
    if policy.loop in ("foreach", "loop") and is_captured and is_on_host:
        raise PolicyError(f"on a CPU only the fused form of {kind} is capturable; leave loop out.")
    if (policy.in_backward or policy.state == "host") and needs_closure(type(optimizer)):
        raise PolicyError(needs_whole(kind))
    if job.has_parts and (policy.in_backward or policy.state):
        raise PolicyError(
            "parameters and optimizer state are sharded over ranks; leave state and in_backward out, or use shard "
            "stage 0 or 1."
        )
    if policy.in_backward:
        if job.averages:
            raise PolicyError(
                "gradients are averaged over ranks after they are complete; a step inside backward would run before "
                "that. Leave in_backward out."
            )
        if any(not parameter.is_leaf for parameter in parameters):
            raise PolicyError(f"{kind} updates non-leaf tensors; it cannot update them inside backward.")
        if any(isinstance(m, torch.nn.parallel.DistributedDataParallel) for m in job.model.modules()):
            raise PolicyError(DISTRIBUTED)


def _set_loop(job: Job, updates: Updates, loop: str) -> None:
    """Sets the update form in every group; the fused form needs its step counters on the device."""
    flags, optimizer = _FLAGS[loop], updates.optimizer
    for group in (*optimizer.param_groups, optimizer.defaults):
        before = {key: group[key] for key in flags if key in group}
        group.update({key: value for key, value in flags.items() if key in group})
        job.on_undo(partial(group.update, before))
    if loop == "fused":
        had = optimizer.__dict__.get("_need_device_dtype_check_for_fused")
        optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]  # its own, set at construction
        if had is None:
            job.on_undo(lambda: optimizer.__dict__.pop("_need_device_dtype_check_for_fused", None))
        updates.before = partial(_keep_correct, job)
        job.on_undo(partial(setattr, updates, "before", None))
        wanted = (updates.before, _begin_momenta) if isinstance(optimizer, torch.optim.SGD) else (updates.before,)
        for each in wanted:
            job.on_undo(optimizer.register_step_pre_hook(each).remove)
    _place_counters(optimizer)
    job.on_undo(lambda: _place_counters(optimizer))


def _keep_correct(job: Job, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Lets groups with gradients that a fused kernel would misread update in a loop, and the others in their form."""
    for group in optimizer.param_groups:
        is_fused = all(takes_fused(optimizer, parameter) for parameter in group["params"])
        if not is_fused:
            job.note(NOT_FUSED)
        if group["fused"] is not is_fused:  # also after load_state_dict, which takes the settings of the file
            group.update(_FLAGS["fused" if is_fused else "loop"])
            _place_counters(optimizer)


def _begin_momenta(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Initialises the missing momenta of a group: fused SGD requires all parameters to have one, or none."""
    for group in optimizer.param_groups:
        if not group["momentum"] or group["dampening"]:
            continue
        own = [parameter for parameter in group["params"] if parameter.grad is not None]
        new = [each for each in own if optimizer.state.get(each, {}).get("momentum_buffer") is None]
        if len(new) < len(own):
            for parameter in new:  # 0 x momentum + gradient, the same initial value as the others
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _place_counters(optimizer: torch.optim.Optimizer) -> None:
    """Moves the step counters to the device that the update form expects."""
    for group in optimizer.param_groups:
        is_on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            counter = optimizer.state[parameter].get("step") if parameter in optimizer.state else None
            if isinstance(counter, torch.Tensor):
                place = parameter.device if is_on_device else torch.device("cpu")
                optimizer.state[parameter]["step"] = counter.to(place)
