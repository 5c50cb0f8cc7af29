"""Decides which optimizer updates end a step, in jobs that train with several optimizers in turn."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

#: An optimizer that has not stepped while another stepped this often is dropped from the round.
PATIENCE = 16


class OptimizerRounds:
    """A step is one round: every optimizer of the job has updated at least once.

    So it is every update in a job with one optimizer, every second in a GAN, every sixth in a Wasserstein GAN with
    five critic updates per generator update. An optimizer that never steps is dropped from the round after a while.
    """

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Any]] = {}
        self._idle: set[int] = set()
        self._updates: dict[int, int] = {}
        self._totals: dict[int, int] = {}
        self._running: list[int] = []
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

    def begin_update(self, optimizer: Any) -> None:
        """Notes that an update begins: those until its end are parts of it."""
        self._leave(id(optimizer))  # an update that raised has no end
        self._running.append(id(optimizer))

    def update(self, optimizer: Any) -> bool:
        """Counts an update that is done; returns True when it ends the step."""
        key = id(optimizer)
        self._leave(key)
        if not self._has_seen(optimizer):
            self.add(optimizer)
        is_first = key not in self._totals and key not in self._idle
        if is_first and self._has_ended and not self._was_called:
            # Created one by one as they update (Pyro), or a wrapper: the update that ended the step did so too early.
            self._totals[key] = 1
            return False
        self._idle.discard(key)
        self._updates[key] = self._updates.get(key, 0) + 1
        self._totals[key] = self._totals.get(key, 0) + 1
        if self._running:
            if self._updates[key] < PATIENCE:
                return False
            self._running.clear()  # the one around it must have raised
        if self._known.keys() == {key}:
            return True  # the job's only optimizer
        missing = self._waited_for() - self._updates.keys()
        if missing and self._updates[key] >= PATIENCE:
            self._idle |= missing
            missing = set()
        return not missing

    def cancel_update(self, optimizer: Any) -> None:
        """Notes that an update is done that does not count."""
        self._leave(id(optimizer))

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

    def _leave(self, key: int) -> None:
        """Forgets a running update, and those begun within it."""
        if key in self._running:
            del self._running[self._running.index(key) :]

    def _waited_for(self) -> set[int]:
        waited = {key for key, reference in self._known.items() if reference() is not None} - self._idle
        silent = waited - self._totals.keys()
        if not silent:
            return waited
        updated = {_parameters_of(self._known[key]()) for key in waited - silent} - {frozenset()}
        return waited - {key for key in silent if _parameters_of(self._known[key]()) in updated}


def state_of_update(optimizer: Any) -> tuple[bool, int]:
    """Returns whether any parameter of an optimizer has a gradient, and how often they have been written to.

    If an update leaves no gradients and changes neither of the two, it had nothing to update.
    """
    with torch._C.DisableTorchFunction():  # otherwise a mode or subclass of the job's sees these reads
        parameters = [each for group in getattr(optimizer, "param_groups", ()) for each in group["params"]]
        # Reading the gradient of any other parameter warns.
        has_gradient = any((each.is_leaf or each.retains_grad) and each.grad is not None for each in parameters)
        return has_gradient, sum(each._version for each in parameters if not each.is_inference())


def _parameters_of(optimizer: Any) -> frozenset[int]:
    """Returns the identities of an optimizer's parameters; none of one that is gone."""
    groups = getattr(optimizer, "param_groups", ())
    return frozenset(id(parameter) for group in groups for parameter in group["params"])
