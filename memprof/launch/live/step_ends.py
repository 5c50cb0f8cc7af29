"""Detects where a step of a model's training ends: after the last of its optimizers' updates."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from memprof.recorder.steps.rounds import OptimizerRounds
from memprof.recorder.steps.update_hooks import UpdateHooks


class StepEnds:
    """Calls back after each step, when hooks may safely be added or removed.

    Updates in other processes and threads, within backward, and of other models end no step.
    """

    def __init__(
        self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], then: Callable[[], None]
    ) -> None:
        """Stores the callback; nothing is called before `install`.

        Args:
            model: The model that is trained.
            optimizers: Its optimizers.
            then: Called after each step.
        """
        self._model, self._then = model, then
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._rounds = OptimizerRounds()
        self._updates = UpdateHooks(self._before_update, self._after_update)
        self._rounds.meet(optimizers)
        self._own: set[int] = set()

    def install(self) -> None:
        """Installs the hooks, after all existing ones."""
        self._updates.install()

    def remove(self) -> None:
        """Removes the hooks; the callback is not called any more."""
        self._updates.remove()

    def _before_update(self, optimizer: Any, *_: Any) -> None:
        if self._counts(optimizer):
            self._rounds.begin_update(optimizer)

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        if not self._counts(optimizer) or not self._updates.is_last() or not self._rounds.update(optimizer):
            return
        self._rounds.begin_step()
        self._then()

    def _counts(self, optimizer: Any) -> bool:
        """Whether an update can end a step: it is the model's, in its thread and outside backward."""
        is_mine = os.getpid() == self._process and threading.get_ident() == self._thread
        return is_mine and torch._C._current_graph_task_id() == -1 and self._is_of_model(optimizer)

    def _is_of_model(self, optimizer: Any) -> bool:
        """Whether an optimizer updates the model: the given ones may be wrappers of those that call the hooks."""
        if not self._own:
            self._own = {id(parameter) for parameter in self._model.parameters()}
        return any(id(parameter) in self._own for group in optimizer.param_groups for parameter in group["params"])
