"""The callback for the Trainer of transformers: `Trainer(..., callbacks=[MemprofCallback(budget="8GiB")])`."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from memprof.integrations.asked import ask
from memprof.integrations.fitting import FittingPlan, describe_choice
from memprof.integrations.hf_arguments import INSTEAD, possible_choices
from memprof.integrations.planned import PlannedTraining
from memprof.integrations.plans import apply_plan
from memprof.integrations.session import Session
from memprof.policies.plan.plan import Plan
from memprof.policies.runtime.job import Job


class MemprofCallback(PlannedTraining, TrainerCallback):  # type: ignore[misc]  # not typed
    """Records some steps of a Trainer, and finds what makes it fit.

        from memprof.integrations.hf import MemprofCallback
        trainer = Trainer(model, args, train_dataset=data, callbacks=[MemprofCallback(budget="8GiB")])

    A step is what the Trainer calls one: all micro-batches up to an update. What it evaluates or saves in between is
    left out. Of several processes each writes its own file. The training goes on whatever becomes of the recording.

    Attributes:
        fit: What was found for the budget, once the recorded steps are over; None before.
        arguments: The TrainingArguments that make the training fit, by name; empty before, where it fits as it is, and
            where none do.
        predicted_bytes: Peak that they were predicted to lead to; 0 without.
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
            skip: Steps to let pass first.
            force: Replace the file, and the plan beside it, if they exist.
            budget: Most bytes that may be allocated at once, as ``"8GiB"``, ``"60%"`` of what the training needs, or
                a number: once the steps are recorded, a plan is searched for and written to ``plan.toml`` beside them,
                and the TrainingArguments that make the training fit are told.
            plan: Plan to train under, or its file: applied before the first step.
            allow: Names of the policies that the plan may use, none for the usual ones.
            forbid: Names of those that it may not.
            time_limit: Longest time that the search for a plan takes, in seconds.

        Raises:
            UsageError: Something makes no sense.
            PolicyError: A policy is named that there is not.
        """
        asked = ask(
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
        self._session = Session(asked, self._find_arguments)
        self._plan = plan
        self._job: Job | None = None
        self._training: tuple[Any, Any] = (None, None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Applies the plan, if there is one, and begins to record.

        Raises:
            PolicyError: The plan does not fit the model; no step has run.
            BadInputError: The plan's file is missing or no TOML.
        """
        self._undo()  # of a training that ended by an error
        model, optimizer = kwargs.get("model"), kwargs.get("optimizer")
        if self._plan is not None and model is not None:
            self._job = apply_plan(self._plan, model, [] if optimizer is None else [optimizer], INSTEAD)
        self._training = model, args
        self._session.begin()
        if args.eval_on_start:
            self._session.pause()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Goes on after an evaluation."""
        self._session.resume()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends a step where memprof record does: behind the update, gradients still there."""
        self._session.end_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leaves out what the Trainer does between two steps, if it does."""
        self._pause_if_asked(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leaves out what the Trainer does between two epochs."""
        self._pause_if_asked(control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leaves out an evaluation that nobody announced."""
        self._session.pause()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the recording, and takes the plan off the model."""
        self._session.end()
        self._training = None, None  # the model is the job's, to keep or to drop
        self._undo()

    def _pause_if_asked(self, control: Any) -> None:
        # The Trainer's own callback decides before all others.
        if control.should_evaluate or control.should_save:
            self._session.pause()

    def _find_arguments(self, fit: FittingPlan) -> list[str]:
        model, args = self._training
        if fit.suggestion is None or model is None:
            return []
        found = fit.fastest(possible_choices(model, args, fit.basis.step))
        if found is not None:
            self.arguments, self.predicted_bytes = dict(found[0].arguments), found[1].peak_bytes
        what = "bf16, activation checkpointing and gradient accumulation"
        return [describe_choice(found, fit, "TrainingArguments", what), *fit.emitted_by("hf")]
