"""Tracks which micro-batch of which batch the training loop is at."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memprof.errors import PolicyError
from memprof.policies.accumulate.policy import IN_EVALUATION, IN_TURN, WEIGHED
from memprof.recorder.steps.batches import first_tensor

#: The rounds of the jobs under accumulate.
ACTIVE: list[Round] = []


@dataclass(frozen=True)
class _Waiting:
    """A part that the loop has received, and run no backward of.

    Attributes:
        tensor: Returns its first tensor while it is alive.
        weight: Its share of the batch's samples.
        batch: The batch that it is part of, counted from 1.
    """

    tensor: Callable[[], torch.Tensor | None]
    weight: float
    batch: int

    @property
    def is_alive(self) -> bool:
        """Whether the loop still holds it."""
        return self.tensor() is not None


class Round:
    """The micro-batches of one update, as the loop receives them.

    Attributes:
        micro_batches: Parts of a full batch.
        number: Index in its batch of the last yielded part.
        count: Parts of that batch; 1 where it was left whole.
        weight: Its share of the batch's samples.
        handed: Parts and whole batches yielded for training so far.
        split: Batches split so far.
        backwards: Backward calls so far.
        backwards_here: Those that completed in the last yielded part.
        left_out: Parts of the batch for which the loop ran no backward.
        is_resting: The loop has left its batches: nothing is split until the next one.
        has_stepped: A step() was held back in the last yielded part.
        returned: Gradients of parameters were returned to the loop, not accumulated, in the last yielded part.
        reason: Why the last batch was left whole, "" where it was split.
    """

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self.number, self.count, self.weight = 0, 1, 1.0
        self.handed = self.split = self.backwards = 0
        self.backwards_here = self.left_out = 0
        self.is_resting = self.has_stepped = self.returned = False
        self.reason = ""
        self._on_abandoned: list[Callable[[], None]] = []
        self._on_next: list[Callable[[], None]] = []
        self._tensor: Callable[[], torch.Tensor | None] = lambda: None
        self._still_evaluates: Callable[[], bool] = lambda: False
        self._backwards_before = 0
        self._waiting: list[_Waiting] = []
        self._batch = self._lost = 0
        self._takes_ahead = False

    @property
    def is_last(self) -> bool:
        """Whether the last yielded part is the last of its batch."""
        return self.number == self.count - 1

    @property
    def is_split(self) -> bool:
        """Whether the loop holds one of several parts of a batch."""
        return self.count > 1 and not self.is_resting

    def on_next(self, action: Callable[[], None]) -> None:
        """Registers a callback for when the loop takes another batch after the last part of one."""
        self._on_next.append(action)

    def rest(self) -> None:
        """Records that the loop has left its batches, provided it has worked on the last one."""
        if self.backwards_here:
            self.is_resting, self.weight = True, 1.0

    def on_abandoned(self, action: Callable[[], None]) -> None:
        """Registers a callback for when the loop leaves a batch before its last part."""
        self._on_abandoned.append(action)

    def hand_out(self, batch: Any, number: int, count: int, weight: float) -> None:
        """Records that the loop receives a part of a batch."""
        here = [part for part in self._waiting if part.batch == self._batch]
        self.left_out = self._lost + sum(not (self._takes_ahead and part.is_alive) for part in here)
        if number == 0:
            for action in self._on_next if self.is_last else self._on_abandoned:
                action()
            self.left_out = self._lost = 0
            self._batch += 1
            self._waiting = [part for part in self._waiting if part.is_alive]
        self.backwards_here = 0
        self.is_resting = self.has_stepped = self.returned = False
        self.number, self.count, self.weight = number, count, weight
        self.handed += 1
        self.split += number == 0 and count > 1
        self.reason, self._still_evaluates = "", lambda: False
        # Weak references: this must not keep the batch alive.
        tensor = first_tensor(batch)
        self._tensor = weakref.ref(tensor) if tensor is not None else lambda: None
        self._waiting.append(_Waiting(self._tensor, weight, self._batch))

    def begin_backward(self) -> float:
        """Counts a backward.

        Of a loop that takes several batches before it works on the first, as the Trainer of transformers does to
        accumulate, the parts are still alive that it has taken ahead; a part that it has skipped is not.

        Returns:
            The weight of the part that the backward is of: the first that waits for one.

        Raises:
            PolicyError: It depends on more than the part, which it is not the first backward of.
        """
        if self.is_split and self.returned:
            raise PolicyError(WEIGHED)
        if self.is_split and self.has_stepped and not (self._waiting or self._takes_ahead):
            raise PolicyError(IN_TURN)
        self.backwards += 1
        if self.is_resting or not self._waiting:
            return self.weight
        self._takes_ahead |= len(self._waiting) > 1 and self._waiting[0].is_alive
        while len(self._waiting) > 1 and not (self._takes_ahead and self._waiting[0].is_alive):
            self._lost += self._waiting.pop(0).batch == self._batch
        self.left_out = self._lost
        return self._waiting.pop(0).weight

    def evaluate(self, still_evaluates: Callable[[], bool]) -> None:
        """Records that the loop receives a whole batch because the model is in evaluation mode.

        Args:
            still_evaluates: Returns whether the model is in evaluation mode.
        """
        self.reason = IN_EVALUATION
        self._still_evaluates, self._backwards_before = still_evaluates, self.backwards

    def trains_in_evaluation(self) -> bool:
        """Whether the loop ran backward on such a batch with the model in evaluation mode throughout."""
        return self.backwards > self._backwards_before and self._still_evaluates()

    def leave_whole(self, batch: Any, reason: str) -> None:
        """Records that the loop receives a whole batch."""
        self.hand_out(batch, 0, 1, 1.0)
        self.reason = reason

    def is_handed(self, batch: Any) -> bool:
        """Whether a batch is the last yielded part."""
        tensor = first_tensor(batch)
        return tensor is not None and self._tensor() is tensor
