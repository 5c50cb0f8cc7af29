"""Applies the optimizer policy to a job: state, update loop, and when updates run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from memprof.errors import PolicyError
from memprof.policies.optimizer.in_backward import InBackward
from memprof.policies.optimizer.refusals import DISTRIBUTED, FUSED_SGD, needs_whole, no_form
from memprof.policies.optimizer.updates import EightBitUpdates, HostUpdates, Updates, updates_of
from memprof.recorder.steps.usages import needs_closure

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
    job.require_optimizer("The optimizer policy")
    for optimizer in job.optimizers:
        _check(job, optimizer, policy)
    kind = {"": Updates, "host": HostUpdates, "8bit": EightBitUpdates}[policy.state]
    updates = []
    effect = job.expect(policy.describe(), f"the optimizer's updates are {policy.loop} already")
    effect.is_tried, effect.is_done = True, bool(policy.state or policy.in_backward)
    for optimizer in job.optimizers:
        updates.append(updates_of(job, optimizer, kind))
        if policy.loop:
            has_form = all(bool(group.get(key)) for group in optimizer.param_groups for key in _needed(policy.loop))
            effect.is_done |= policy.loop == "loop" or not has_form
            _set_loop(job, optimizer, policy.loop)
    if policy.in_backward:
        InBackward(job, updates, kind).start()
        job.notes.append("Gradients are freed inside backward, where each parameter is updated.")


def _check(job: Job, optimizer: torch.optim.Optimizer, policy: OptimizerPolicy) -> None:
    kind = type(optimizer).__name__
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if policy.state == "host" and all(parameter.device.type == "cpu" for parameter in parameters):
        raise PolicyError("The parameters and the optimizer state are already in host memory; host changes nothing.")
    if policy.loop and not all(key in group for group in optimizer.param_groups for key in _needed(policy.loop)):
        raise PolicyError(no_form(kind, policy.loop))
    if policy.loop == "fused" and any(not parameter.is_floating_point() for parameter in parameters):
        raise PolicyError(f"The fused form of {kind} updates floating point parameters only; write foreach.")
    is_short = any(each.dtype == torch.bfloat16 and each.device.type == "cpu" for each in parameters)
    if policy.loop == "fused" and is_short and isinstance(optimizer, torch.optim.SGD):
        raise PolicyError(FUSED_SGD)
    if (policy.in_backward or policy.state == "host") and needs_closure(type(optimizer)):
        raise PolicyError(needs_whole(kind))
    if job.has_parts and (policy.in_backward or policy.state):
        raise PolicyError(
            "Parameters and optimizer state are sharded over ranks; leave state and in_backward out, or use shard "
            "stage 0 or 1."
        )
    if policy.in_backward:
        if job.averages:
            raise PolicyError(
                "Gradients are averaged over ranks after they are complete; a step inside backward would run before "
                "that. Leave in_backward out."
            )
        if any(not parameter.is_leaf for parameter in parameters):
            raise PolicyError(f"{kind} updates non-leaf tensors; it cannot update them inside backward.")
        if any(isinstance(m, torch.nn.parallel.DistributedDataParallel) for m in job.model.modules()):
            raise PolicyError(DISTRIBUTED)


def _needed(loop: str) -> tuple[str, ...]:
    return ("foreach",) if loop in ("foreach", "loop") else ("fused",)


def _set_loop(job: Job, optimizer: torch.optim.Optimizer, loop: str) -> None:
    """Sets the update form in every group; the fused form needs its step counters on the device."""
    flags = _FLAGS[loop]
    for group in (*optimizer.param_groups, optimizer.defaults):
        before = {key: group[key] for key in flags if key in group}
        group.update({key: value for key, value in flags.items() if key in group})
        job.on_undo(partial(group.update, before))
    if loop == "fused":
        had = optimizer.__dict__.get("_need_device_dtype_check_for_fused")
        optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]  # its own, set at construction
        if had is None:
            job.on_undo(lambda: optimizer.__dict__.pop("_need_device_dtype_check_for_fused", None))
        if isinstance(optimizer, torch.optim.SGD):
            job.on_undo(optimizer.register_step_pre_hook(_begin_momenta).remove)
    _place_counters(optimizer)
    job.on_undo(lambda: _place_counters(optimizer))


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
