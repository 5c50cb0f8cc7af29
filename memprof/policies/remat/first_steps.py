"""Measures the peak of a job's first steps, to which a budget in per cent refers."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from memprof.policies.remat.cells import Need
from memprof.policies.remat.counters import Counter

#: Backward passes after which the budget is set even if no optimizer of torch has been updated.
_MOST_PASSES = 16


class FirstSteps:
    """Runs the job without a limit until a backward pass ends that began after the first update of an optimizer.

    Optimizers allocate their state in their first step: the peak that repeats is that of the steps after it.
    """

    def __init__(self, counter: Counter, share: float) -> None:
        """Starts measuring.

        Args:
            counter: Counts the allocated bytes.
            share: The budget as a share of the peak.
        """
        self._counter = counter
        self._share = share
        self._highest_bytes = self._before_bytes = self._passes = 0
        self._has_updated = self._had_updated = False
        self._hook = register_optimizer_step_post_hook(self._updated)

    def step_begins(self) -> None:
        """Notes that autograd is about to save the first tensor."""
        self._had_updated = self._has_updated

    def begins(self) -> None:
        """Notes that an operator is about to run."""
        self._before_bytes = self._counter.used_bytes()

    def ran(self, need: Need) -> None:
        """Notes that it ran."""
        self._highest_bytes = max(self._highest_bytes, self._before_bytes + max(need.highest_bytes, 0))

    def step_ended(self) -> int:
        """Notes that autograd keeps nothing any more; returns the budget in bytes, 0 until the peak is known."""
        self._passes += 1
        if not self._had_updated and self._passes < _MOST_PASSES:
            return 0
        return int(self._highest_bytes * self._share)

    def stop(self) -> None:
        """Stops measuring."""
        self._hook.remove()

    def _updated(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._has_updated = True
