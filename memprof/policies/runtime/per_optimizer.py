"""What a policy keeps of each optimizer, shared by the jobs of all models that the optimizer updates.

A plan is applied to each model that a script calls: to an encoder and a decoder, each a job of its own. One optimizer
may update both, and is changed once.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from memprof.policies.runtime.job import Job


class _OfOptimizer(Protocol):
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...


Kept = TypeVar("Kept", bound=_OfOptimizer)


class PerOptimizer(Generic[Kept]):
    """The objects that one policy has made for optimizers, until the job that made them is undone or gone."""

    def __init__(self) -> None:
        """Starts empty."""
        self._kept: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()

    def get(self, optimizer: torch.optim.Optimizer) -> Kept | None:
        """Returns what is kept of an optimizer, None if nothing."""
        kept = self._kept.get(id(optimizer))
        return kept if kept is not None and kept.optimizer is optimizer else None

    def keep(self, job: Job, kept: Kept) -> None:
        """Keeps an object for the other jobs of its optimizer.

        Args:
            job: The job that has changed the optimizer and holds the object.
            kept: The object.
        """
        key = id(kept.optimizer)
        self._kept[key] = kept
        job.on_undo(partial(self._kept.pop, key, None))
