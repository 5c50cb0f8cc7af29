"""Applies a plan from a callback, once the library has set up its model and its optimizers."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from memprof.errors import PolicyError
from memprof.launch import child
from memprof.launch.apply import apply
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import read_plan
from memprof.policies.runtime.job import Job


def apply_plan(
    given: Plan | str | os.PathLike[str],
    model: torch.nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    framework: str,
) -> Job:
    """Applies a plan before the first step.

    Args:
        given: The plan, or its TOML file.
        model: The model.
        optimizers: Its optimizers; the library's wrappers are removed first.
        framework: The training framework, as in ``Policy.set_in_framework``.

    Returns:
        The job; its ``undo()`` reverts all changes.

    Raises:
        PolicyError: The plan does not fit, or contains a policy that the framework must apply itself; nothing has been
            changed.
        BadInputError: The file is missing or not valid TOML.
    """
    plan = given if isinstance(given, Plan) else read_plan(given)
    for policy in plan.policies:
        if framework in policy.set_in_framework:
            instead = policy.set_in_framework[framework]
            raise PolicyError(
                f"{policy.describe()} cannot be applied from a callback: {instead} Remove it from the plan then."
            )
    if child.has_plan():
        raise PolicyError("memprof record already applies a plan to this job: remove plan= or --plan.")
    return apply(plan, model, [inner_optimizer(optimizer) for optimizer in optimizers])


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer inside a library's wrapper; the wrapper never updates anything itself."""
    while not getattr(type(optimizer).step, "hooked", False):
        inside = getattr(optimizer, "optimizer", None) or getattr(optimizer, "_optimizer", None)
        if not isinstance(inside, torch.optim.Optimizer):
            return optimizer
        optimizer = inside
    return optimizer
