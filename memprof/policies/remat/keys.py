"""Names saved tensors so that a plan can speak of them: the module, the operator, and which of its runs made them."""

from __future__ import annotations

import functools
from collections import Counter as Counts
from collections.abc import Callable
from typing import Any

import torch

from memprof.errors import PolicyError
from memprof.policies.remat.cells import Cell
from memprof.policies.remat.memory import Memory
from memprof.policies.remat.names import key_of
from memprof.policies.runtime.job import Job


class Keys:
    """Decides by name what becomes of saved tensors: dropped as soon as nobody else holds them, or kept.

    Runs are counted from the call of the model on, in each module by itself, so that a model that calls others in
    another order keeps its names.
    """

    def __init__(self, memory: Memory, recompute: tuple[str, ...]) -> None:
        """Takes what the plan says.

        Args:
            memory: Drops them.
            recompute: Keys of what is dropped.
        """
        self._memory = memory
        self._dropped = frozenset(recompute)
        self._modules = [""]
        self._counts: Counts[tuple[str, str]] = Counts()
        self.found: set[str] = set()

    def install(self, job: Job) -> None:
        """Follows which module of a job runs.

        Raises:
            PolicyError: A key speaks of a module that the model does not have: the plan is for another one.
        """
        modules = job.modules_named()
        unknown = sorted({key.partition(":")[0] for key in self._dropped} - set(modules))
        if unknown:
            raise PolicyError(
                f"The plan was made for another model: remat is to make tensors of {unknown[0]!r} again, and there is "
                "no such module. Make it anew from a recording of this one."
            )
        for name, module in modules.items():
            if type(module).forward is not torch.nn.Module.forward:
                job.wrap_forward(module, functools.partial(self._following, name))

    def name(self, operator_name: str) -> str:
        """Returns the key of an operator's run: it is counted."""
        module = self._modules[-1]
        number = self._counts[module, operator_name]
        self._counts[module, operator_name] = number + 1
        return key_of(module, operator_name, number)

    def decide(self, cell: Cell) -> None:
        """Lets a tensor that was just saved go, where the plan says so."""
        key = cell.recipe.key if cell.recipe is not None else ""
        if key in self._dropped:
            self.found.add(key)
            self._memory.due.append(cell)
        elif not self._memory.budget_bytes:
            cell.is_kept = True

    def _following(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def following(*args: Any, **kwargs: Any) -> Any:
            if len(self._modules) == 1 and not self._memory.saved:
                self._counts.clear()
            self._modules.append(name)
            try:
                return forward(*args, **kwargs)
            finally:
                self._modules.pop()

        return following
