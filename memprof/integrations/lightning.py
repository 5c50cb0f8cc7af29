"""The callback for Lightning's Trainer: `Trainer(..., callbacks=[MemprofCallback(budget="8GiB")])`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from memprof.integrations.fitting import Choice, FittingPlan, describe_choice
from memprof.integrations.planned import PlannedTraining, apply_plan
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.base import Policy
from memprof.policies.precision.policy import Precision

#: Import names of Lightning, the newer one first.
_LIBRARIES = ("lightning.pytorch", "pytorch_lightning")


def _callback_type() -> Any:
    """Returns the Callback class of the Lightning in use: the one already imported, else the one installed.

    Raises:
        ImportError: Neither is installed.
    """
    imported = [name for name in _LIBRARIES if name in sys.modules]
    for name in imported or [name for name in _LIBRARIES if find_spec(name.partition(".")[0]) is not None]:
        return import_module(f"{name}.callbacks").Callback
    raise ImportError("memprof.integrations.lightning needs Lightning: pip install lightning")


_Callback: Any = _callback_type()


class MemprofCallback(PlannedTraining, _Callback):  # type: ignore[misc]  # the base class is only known at import
    """Records some steps of a Lightning Trainer, and finds a plan that makes it fit.

        from memprof.integrations.lightning import MemprofCallback
        trainer = Trainer(callbacks=[MemprofCallback(budget="8GiB")])

    A step is all batches up to an update; with manual optimization, one round of all optimizers. Validation is
    excluded. With several processes, each writes its own file. Training continues even if recording fails.

    Attributes:
        arguments: The Trainer's arguments that make the training fit, by name; empty before they are known, if it
            already fits, and if none do.
        predicted_bytes: Their predicted peak; 0 if there are none.
    """

    _trainer: Any = None
    _updates = 0
    _is_inside_step = False
    _is_paused = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Applies the plan, if there is one, and starts recording.

        Raises:
            PolicyError: The plan does not fit the model; no step has run.
            BadInputError: The plan's file is missing or not valid TOML.
        """
        self._undo()  # left over from a training that ended with an error
        if self._plan is not None:
            self._job = apply_plan(self._plan, pl_module, trainer.optimizers, "lightning")
        self._trainer, self._updates = trainer, trainer.global_step
        self._is_inside_step = self._is_paused = False
        self._session.begin(ends_steps=pl_module.automatic_optimization)

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Resumes after a validation, if a step starts here."""
        if self._is_paused and not self._is_inside_step:
            self._resume()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Ends a step if the batch ended with an update."""
        if not pl_module.automatic_optimization:
            self._session.look()  # updates end steps: with several optimizers, any may update in a batch
            return
        self._is_inside_step = trainer.global_step == self._updates
        if self._is_inside_step:
            return
        self._updates = trainer.global_step
        if self._is_paused:
            self._resume()  # the step that the validation interrupted is dropped
        else:
            self._session.end_step()

    def on_validation_start(self, *_: Any, **__: Any) -> None:
        """Pauses recording for a validation."""
        self._is_paused = True
        self._session.pause()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Ends the recording of a training that fails, and records the error."""
        self._session.end(exception)

    def on_train_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Ends the recording."""
        self._session.end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Undoes the plan."""
        self._session.end()
        self._trainer = None
        self._undo()

    def _resume(self) -> None:
        self._is_paused = False
        self._session.resume()

    def _find_arguments(self, fit: FittingPlan) -> list[str]:
        if fit.suggestion is None or self._trainer is None:
            return []
        found = fit.fastest(_possible_choices(self._trainer))
        if found is not None:
            self.arguments, self.predicted_bytes = dict(found[0].arguments), found[1].peak_bytes
        sentence = describe_choice(found, fit, "Trainer arguments", "precision and accumulate_grad_batches")
        if "accumulate_grad_batches" in self.arguments:
            parts = self.arguments["accumulate_grad_batches"] // self._trainer.accumulate_grad_batches
            sentence += f" Divide the DataLoader's batch size by {parts}."
        return [sentence, *fit.emitted_by("lightning")]


def _possible_choices(trainer: Any) -> Iterator[Choice]:
    """Yields the candidate Trainer arguments: combinations of precision and accumulation."""
    mixed = () if "16" in str(trainer.precision) else (Precision("bf16"),)
    is_automatic = trainer.lightning_module.automatic_optimization
    for precision in (None, *mixed):
        for parts in (1, 2, 4, 8, 16, 32) if is_automatic else (1,):
            arguments: dict[str, Any] = {}
            policies: list[Policy] = []
            if precision is not None:
                arguments["precision"] = "bf16-mixed"
                policies.append(precision)
            if parts > 1:
                arguments["accumulate_grad_batches"] = trainer.accumulate_grad_batches * parts
                policies.append(Accumulate(parts))
            if policies:
                yield Choice(arguments, tuple(policies))
