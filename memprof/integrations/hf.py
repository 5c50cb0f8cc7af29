"""The callback for the Trainer of transformers: `Trainer(..., callbacks=[MemprofCallback(budget="8GiB")])`."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback

from memprof.integrations.fitting import Choice, FittingPlan, describe_choice
from memprof.integrations.planned import PlannedTraining, apply_plan
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.precision.policy import Precision
from memprof.trace.step import Step


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


#: Checkpointing intervals to try, in layers; larger ones are left out.
_EVERY = (1, 2, 3, 4, 6, 8)


def possible_choices(model: Any, args: Any, step: Step) -> Iterator[Choice]:
    """Yields the candidate arguments: combinations of precision, activation checkpointing and accumulation.

    Args:
        model: The model that is trained.
        args: Its current TrainingArguments.
        step: The recorded step, whose modules the policies name.
    """
    precisions = [] if args.bf16 or args.fp16 else [({"bf16": True}, Precision("bf16"))]
    ways = (precisions, _splits(args), _checkpoints(model, args, step))
    for parts in itertools.product(*(((None, None), *way) for way in ways)):
        arguments: dict[str, Any] = {}
        policies: list[Policy] = []
        for own, policy in parts:
            if own is not None and policy is not None:
                arguments |= own
                policies.append(policy)
        if policies:
            yield Choice(arguments, tuple(policies))


def _splits(args: Any) -> list[tuple[dict[str, Any], Policy]]:
    """Returns the accumulation candidates: numbers of parts that divide the batch."""
    batch, rounds = args.per_device_train_batch_size, args.gradient_accumulation_steps
    return [
        (
            {"per_device_train_batch_size": batch // parts, "gradient_accumulation_steps": rounds * parts},
            Accumulate(parts),
        )
        for parts in range(2, batch + 1)
        if batch % parts == 0
    ]


def _checkpoints(model: Any, args: Any, step: Step) -> list[tuple[dict[str, Any], Policy]]:
    """Returns the checkpointing candidates, over the layers that the model itself would checkpoint."""
    layers = _layers(model, step)
    if not layers or any(getattr(args, f"{what}_checkpointing", False) for what in ("activation", "gradient")):
        return []
    if not hasattr(args, "activation_checkpointing"):
        return [({"gradient_checkpointing": True}, Checkpoint(layers))]
    on: dict[str, Any] = {"activation_checkpointing": True}
    found: list[tuple[dict[str, Any], Policy]] = [(on, Checkpoint(layers))]
    if "every_n_layers" in inspect.signature(model.activation_checkpointing_enable).parameters:
        found += [
            ({**on, "activation_checkpointing_kwargs": {"every_n_layers": every}}, Checkpoint(layers[::every]))
            for every in _EVERY[1:]
            if every < len(layers)
        ]
    return found


def _layers(model: Any, step: Step) -> tuple[str, ...]:
    """Returns the recorded step's names of the layers that the model checkpoints; none if they differ."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        return ()
    try:
        from transformers.modeling_layers import GradientCheckpointingLayer
    except ImportError:
        return ()  # older transformers, whose layers are not marked
    names = [name for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)]
    known = set(step.modules.name.tolist())
    for prefix in ("", f"{type(model).__name__}.", "module."):  # the last within DistributedDataParallel
        if all(prefix + name in known for name in names):
            return tuple(prefix + name for name in names)
    return ()
