"""Updates one parameter after another in an optimizer's step, each within a context of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from memprof.policies.optimizer.updates import Updates


class OneByOne:
    """Updates the parameters one by one before the optimizer's own step, which then finds no gradients.

    The own step still runs, so that whatever wraps it (schedulers, gradient scalers, gradient accumulation) and its
    hooks work as before.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, around: Callable[[torch.Tensor], AbstractContextManager[None]]
    ) -> None:
        """Stores both; changes nothing.

        Args:
            optimizer: The optimizer.
            around: Given a parameter, returns the context of its update.
        """
        self._updates = Updates(optimizer)
        self._around = around
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Updates every parameter that has a gradient, and hides the gradients: a pre-hook of the optimizer's step.

        A closure is called here; the step gets one that returns the same loss.
        """
        self._show()  # left by a step that ended with an exception
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        given = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            given = (optimizer, lambda: loss), {key: each for key, each in kwargs.items() if key != "closure"}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in list(group["params"]):
                if parameter.grad is not None:
                    with self._around(parameter):
                        self._updates.single(number, parameter)
                    self._hidden.append((parameter, parameter.grad))
        for parameter, _ in self._hidden:
            parameter.grad = None
        return given

    def after_step(self, *_: Any) -> None:
        """Shows the gradients again: a post-hook."""
        self._show()
        self._updates.end_round()

    def _show(self) -> None:
        hidden, self._hidden = self._hidden, []
        for parameter, gradient in hidden:
            if parameter.grad is None:
                parameter.grad = gradient
