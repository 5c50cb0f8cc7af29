"""Updates one parameter after another in an optimizer's step, each within a context of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from memprof.policies.optimizer.updates import Updates
from memprof.policies.runtime.job import Job
from memprof.policies.runtime.replaced import replace_method
from memprof.recorder.steps.update_hooks import is_inner_step


class OneByOne:
    """Updates the parameters one by one before the optimizer's own step, which then finds no gradients.

    The own step still runs, so that whatever wraps it (schedulers, gradient scalers, gradient accumulation) and its
    hooks work as before.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, around: Callable[[torch.Tensor], AbstractContextManager[None]]
    ) -> None:
        self._updates = Updates(optimizer)
        self._around = around
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []

    def install(self, job: Job) -> None:
        """Registers the hooks of the step: updates come after the job's own pre-hooks, which may clip gradients.

        Gradients are there again before its post-hooks, which may read them.
        """
        optimizer = self._updates.optimizer
        register = optimizer.register_step_pre_hook
        before, after = register(self._before_step), optimizer.register_step_post_hook(self._after_step)
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]

        def register_inside(hook: Any) -> Any:
            handle = register(hook)
            if before.id in optimizer._optimizer_step_pre_hooks:
                optimizer._optimizer_step_pre_hooks.move_to_end(before.id)  # type: ignore[attr-defined]
            return handle

        job.on_undo(replace_method(optimizer, "register_step_pre_hook", register_inside))
        job.on_undo(before.remove)
        job.on_undo(after.remove)

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Updates every parameter that has a gradient, and hides the gradients.

        A closure is called here; the step gets one that returns the same loss.
        """
        if is_inner_step(optimizer):
            return None
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

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if is_inner_step(optimizer):
            return
        self._show()
        self._updates.end_round()

    def _show(self) -> None:
        hidden, self._hidden = self._hidden, []
        for parameter, gradient in hidden:
            if parameter.grad is None:
                parameter.grad = gradient
