"""The common base of callbacks: a recording, a search, and a plan that is applied and undone at the end."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch

from memprof.errors import PolicyError
from memprof.integrations.fitting import FittingPlan, make_request
from memprof.integrations.session import Session
from memprof.launch import child
from memprof.launch.apply import apply
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import read_plan
from memprof.policies.runtime.job import Job


class PlannedTraining:
    """A training that is recorded, and optionally runs under a plan.

    Attributes:
        arguments: The Trainer's arguments that make the training fit, by name; empty before they are known, if it
            already fits, and if none do.
        predicted_bytes: Their predicted peak; 0 if there are none.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = "run.memprof",
        *,
        steps: int = 3,
        skip: int = 2,
        force: bool = False,
        budget: str | int | None = None,
        plan: Plan | str | os.PathLike[str] | None = None,
        allow: tuple[str, ...] | list[str] = (),
        forbid: tuple[str, ...] | list[str] = (),
        time_limit: float = 30.0,
    ) -> None:
        """Prepares a recording.

        Args:
            path: File to write; a further training of the same Trainer writes ``run.2.memprof``.
            steps: Steps to record.
            skip: Steps to skip first.
            force: Overwrite the file, and the plan next to it, if they exist.
            budget: Maximum live bytes, as ``"8GiB"``, ``"60%"`` of the recorded peak, or a number: once the steps are
                recorded, a plan is searched for and written to ``plan.toml`` next to them, and the matching arguments
                of the Trainer are printed.
            plan: Plan to train under, or its file; applied before the first step.
            allow: Names of the policies that the plan may use; none for the default ones.
            forbid: Names of the policies that it may not use.
            time_limit: Time limit of the plan search, in seconds.

        Raises:
            UsageError: An argument is invalid.
            PolicyError: Unknown policy.
        """
        super().__init__()
        request = make_request(
            path,
            steps=steps,
            skip=skip,
            force=force,
            budget=budget,
            allow=allow,
            forbid=forbid,
            time_limit=time_limit,
        )
        self.arguments: dict[str, Any] = {}
        self.predicted_bytes = 0
        self._session = Session(request, self._find_arguments)
        self._plan = plan
        self._job: Job | None = None

    @property
    def fit(self) -> FittingPlan | None:
        """The search result for the budget, once the recorded steps are over; None before."""
        return self._session.fit

    @abstractmethod
    def _find_arguments(self, fit: FittingPlan) -> list[str]:
        """Finds the Trainer's arguments that make the training fit; returns sentences about them."""

    def _undo(self) -> None:
        """Undoes the plan, if one was applied."""
        job, self._job = self._job, None
        if job is not None:
            job.undo()


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
