"""Names saved tensors for plans: the module, the operator, and the index of its run."""

from __future__ import annotations

import functools
from collections import Counter as Counts
from collections.abc import Callable
from typing import Any

import torch

from memprof.errors import PolicyError
from memprof.policies.evict.names import key_of
from memprof.policies.remat.cells import Cell
from memprof.policies.remat.memory import Memory
from memprof.policies.runtime.job import Job


class Keys:
    """Decides by name whether a saved tensor is kept, or dropped once nothing else references it.

    Runs are counted from the model's call on, per module, so keys do not change if a model calls its modules in another
    order.
    """

    def __init__(self, memory: Memory, recompute: tuple[str, ...]) -> None:
        """Stores the plan's keys.

        Args:
            memory: Drops the tensors.
            recompute: Keys of the tensors to drop.
        """
        self._memory = memory
        self._dropped = frozenset(recompute)
        self._modules = [""]
        self._counts: Counts[tuple[str, str]] = Counts()
        self.found: set[str] = set()

    def install(self, job: Job) -> None:
        """Tracks which module of a job is running.

        Raises:
            PolicyError: A key names a module that the model does not have: the plan is for another model.
        """
        modules = job.modules_named()
        unknown = sorted({key.partition(":")[0] for key in self._dropped} - set(modules))
        if unknown:
            raise PolicyError(
                f"The plan was made for another model: it recomputes tensors of {unknown[0]!r}, and this model has no "
                "such module. Create a new plan from a recording of this one."
            )
        for name, module in modules.items():
            if type(module).forward is not torch.nn.Module.forward:
                job.wrap_forward(module, functools.partial(self._following, name))

    def name(self, operator_name: str) -> str:
        """Returns the key of an operator's run, and counts the run."""
        module = self._modules[-1]
        number = self._counts[module, operator_name]
        self._counts[module, operator_name] = number + 1
        return key_of(module, operator_name, number)

    def decide(self, cell: Cell) -> None:
        """Marks a newly saved tensor for dropping if the plan names it."""
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
