"""Determines which models a job trains. Only a trained model's call with gradients off counts as evaluation."""

from __future__ import annotations

import weakref

import torch

from memprof.recorder.memory.parts import parameters_of
from memprof.recorder.steps.progress import Progress
from memprof.recorder.steps.rounds import OptimizerRounds


class TrainedModels:
    """The models updated by an optimizer of the job; without an optimizer, those called with gradients on.

    Frozen teachers, encoders and target networks are in no optimizer. Results are cached for one step.
    """

    def __init__(self, rounds: OptimizerRounds) -> None:
        """Stores the job's optimizers."""
        self._rounds = rounds
        self._updated: set[int] | None = None
        self._answers: dict[int, bool] = {}
        self._called: set[int] = set()
        self._differentiated: dict[int, weakref.ref[torch.Tensor]] = {}

    def begin_step(self) -> None:
        """Clears the cache: models may be frozen, and optimizers created, between two steps."""
        self._updated = None
        self._answers.clear()

    def begin_call(self, progress: Progress, module: torch.nn.Module, number: int, *, is_in_function: bool) -> None:
        """Notes in the job's progress what an outermost call outside backward begins.

        Args:
            progress: The progress.
            module: The model called.
            number: Its number in the registry.
            is_in_function: Gradients may be off because a custom autograd function of the job's calls it.
        """
        if torch.is_grad_enabled():
            self._note_call(module, number)
            progress.begin_model_call(module.training if self.is_trained(module, number) else None)
        elif not is_in_function and self.is_trained(module, number):
            progress.begin_evaluation()

    def _note_call(self, module: torch.nn.Module, number: int) -> None:
        """Notes that a model is called with gradients on."""
        if number not in self._called and not self._rounds.has_optimizers:
            self._called.add(number)
            self._differentiated.update(
                {id(each): weakref.ref(each) for each in parameters_of(module) if each.requires_grad}
            )
            self._answers.clear()

    def is_trained(self, module: torch.nn.Module, number: int) -> bool:
        """Whether a job trains a model or a part of it.

        Args:
            module: The model.
            number: Its number in the registry.
        """
        known = self._answers.get(number)
        if known is None:
            known = self._answers[number] = any(self._is_updated(each) for each in parameters_of(module))
        return known

    def _is_updated(self, parameter: torch.Tensor) -> bool:
        if not self._rounds.has_optimizers:
            reference = self._differentiated.get(id(parameter))
            return reference is not None and reference() is parameter
        if self._updated is None:
            groups = (group for optimizer in self._rounds.alive() for group in optimizer.param_groups)
            self._updated = {id(each) for group in groups for each in group["params"]}
        return id(parameter) in self._updated
