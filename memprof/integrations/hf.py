"""The callback for the Trainer of transformers: `Trainer(..., callbacks=[MemprofCallback(budget="8GiB")])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from memprof.integrations.fitting import FittingPlan, describe_choice
from memprof.integrations.hf_arguments import possible_choices
from memprof.integrations.planned import PlannedTraining
from memprof.integrations.plans import apply_plan


class MemprofCallback(PlannedTraining, TrainerCallback):  # type: ignore[misc]  # not typed
    """Records some steps of a Trainer, and finds a plan that makes it fit.

        from memprof.integrations.hf import MemprofCallback
        trainer = Trainer(model, args, train_dataset=data, callbacks=[MemprofCallback(budget="8GiB")])

    A step is the Trainer's own: all micro-batches up to an update. Evaluation and saving in between are excluded.
    With several processes, each writes its own file. Training continues even if recording fails.

    Attributes:
        fit: The search result for the budget, once the recorded steps are over; None before.
        arguments: The TrainingArguments that make the training fit, by name; empty before, if it already fits, and if
            none do.
        predicted_bytes: Their predicted peak; 0 if there are none.
    """

    #: The model and its TrainingArguments, while it trains.
    _training: tuple[Any, Any] = (None, None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Applies the plan, if there is one, and starts recording.

        Raises:
            PolicyError: The plan does not fit the model; no step has run.
            BadInputError: The plan's file is missing or not valid TOML.
        """
        self._undo()  # left over from a training that ended with an error
        model, optimizer = kwargs.get("model"), kwargs.get("optimizer")
        if self._plan is not None and model is not None:
            self._job = apply_plan(self._plan, model, [] if optimizer is None else [optimizer], "hf")
        self._training = model, args
        self._session.begin()
        if args.eval_on_start:
            self._session.pause()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Resumes after an evaluation."""
        self._session.resume()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends a step where memprof record does: after the update, before gradients are freed."""
        self._session.end_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pauses recording for what the Trainer does between two steps, if anything."""
        self._pause_if_due(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pauses recording for what the Trainer does between two epochs."""
        self._pause_if_due(control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pauses recording for an unannounced evaluation."""
        self._session.pause()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the recording, and undoes the plan."""
        self._session.end()
        self._training = None, None  # the job owns the model's lifetime
        self._undo()

    def _pause_if_due(self, control: Any) -> None:
        # The Trainer's own callback runs before all others.
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
