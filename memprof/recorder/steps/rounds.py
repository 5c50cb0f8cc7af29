"""Decides which optimizer updates end a step, in jobs that train with several optimizers in turn."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

#: An optimizer that has not stepped while another stepped this often is dropped from the round.
PATIENCE = 16


class OptimizerRounds:
    """A step is one round: every optimizer of the job has updated at least once.

    So it is every update in a job with one optimizer, every second in a GAN, every sixth in a Wasserstein GAN with
    five critic updates per generator update. An optimizer that never steps is dropped from the round after a while.
    """

    def __init__(self) -> None:
        """Starts with no optimizer."""
        self._known: dict[int, weakref.ref[Any]] = {}
        self._idle: set[int] = set()
        self._updates: dict[int, int] = {}
        self._totals: dict[int, int] = {}
        self._has_ended = False
        self._was_called = False

    @property
    def has_optimizers(self) -> bool:
        """Whether the job has created an optimizer that is still alive."""
        return any(reference() is not None for reference in self._known.values())

    def alive(self) -> list[Any]:
        """Lists the live optimizers."""
        return [optimizer for reference in self._known.values() if (optimizer := reference()) is not None]

    def numbered(self) -> list[tuple[int, Any, int]]:
        """Lists the live optimizers: number in the order seen, optimizer, updates seen so far."""
        known = enumerate(self._known.items())
        return [
            (number, optimizer, self._totals.get(key, 0))
            for number, (key, reference) in known
            if (optimizer := reference()) is not None
        ]

    @property
    def updates(self) -> int:
        """Optimizer updates since the last step ended."""
        return sum(self._updates.values())

    @property
    def members(self) -> int:
        """Optimizers that make up a round."""
        return len(self._waited_for() | self._updates.keys())

    def add(self, optimizer: Any) -> None:
        """Adds an optimizer, unless it wraps another one and never reports an update itself.

        torch marks the `step` of every class whose optimizers report; wrappers (accelerate's, opacus') subclass
        Optimizer without its `__init__`, so theirs is not marked.
        """
        if not getattr(type(optimizer).step, "hooked", False):
            return
        self._known[id(optimizer)] = weakref.ref(optimizer)
        self._totals.pop(id(optimizer), None)
        self._idle.discard(id(optimizer))

    def meet(self, optimizers: Iterable[Any]) -> bool:
        """Adds optimizers found in the process; returns whether any was new."""
        new = [optimizer for optimizer in optimizers if not self._has_seen(optimizer)]
        for optimizer in new:
            self.add(optimizer)
        return any(self._has_seen(optimizer) for optimizer in new)

    def update(self, optimizer: Any) -> bool:
        """Counts an update; returns True when it ends the step."""
        key = id(optimizer)
        if not self._has_seen(optimizer):
            self.add(optimizer)
            if self._has_ended and not self._was_called:
                # Created one by one as they update (Pyro): the first update ended the step, and this one is part of it.
                self._totals[key] = 1
                return False
        self._idle.discard(key)
        self._updates[key] = self._updates.get(key, 0) + 1
        self._totals[key] = self._totals.get(key, 0) + 1
        missing = self._waited_for() - self._updates.keys()
        if missing and self._updates[key] >= PATIENCE:
            self._idle |= missing
            missing = set()
        return not missing

    def begin_step(self) -> None:
        """Starts a new round."""
        self._has_ended |= bool(self._updates)
        self._was_called = False
        self._updates.clear()

    def note_call(self) -> None:
        """Notes a model call."""
        self._was_called = True

    def _has_seen(self, optimizer: Any) -> bool:
        known = self._known.get(id(optimizer))
        return known is not None and known() is optimizer

    def _waited_for(self) -> set[int]:
        return {key for key, reference in self._known.items() if reference() is not None} - self._idle
