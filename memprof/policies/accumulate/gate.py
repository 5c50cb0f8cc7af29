"""Makes the calls that end a step take effect once per batch instead of once per micro-batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from memprof.errors import PolicyError
from memprof.policies.accumulate.policy import DROPPED, LBFGS, left_whole
from memprof.policies.accumulate.round import Round
from memprof.policies.accumulate.watch import Gradients, require_backward
from memprof.policies.runtime.replaced import replace, replace_method


class OptimizerGate:
    """Defers an optimizer's step() and zero_grad() until the last micro-batch of a batch.

    A loop that already accumulates, calling step() every few batches, keeps doing so: each call counts as one of
    ``micro_batches`` calls.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, current: Round, gradients: Gradients, *, is_first_whole: bool
    ) -> None:
        self.optimizer = optimizer
        self._round = current
        self._gradients = gradients
        self._whole_allowed = 1 if is_first_whole else 0
        self._calls = 0
        self._backwards_at_call = 0
        self._is_inside = False
        self._step: Any = None
        self._zero_grad: Any = None
        self._restore: list[Callable[[], None]] = []

    @property
    def is_open(self) -> bool:
        """Whether updates have been deferred that the next one stands for."""
        return self._calls > 0

    @property
    def closes(self) -> bool:
        """Whether a step() call now would update."""
        enough = min(self._round.micro_batches, self._round.count) - self._round.left_out
        return self._is_inside or self._round.is_resting or (self._round.is_last and self._calls + 1 >= enough)

    def install(self) -> None:
        """Starts deferring."""
        self._step, self._zero_grad = self.optimizer.step, self.optimizer.zero_grad
        self._restore = [replace_method(self.optimizer, each.__name__, each) for each in (self.step, self.zero_grad)]

    def remove(self) -> None:
        """Restores every call; wrappers added around it since remain."""
        for restore in self._restore:
            restore()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Updates at the last micro-batch; before that, only runs a closure, for its backward."""
        if self._is_inside or (self._round.is_resting and not self.is_open):
            return self._step(*args, **kwargs)
        self.require_micro_batches()
        closure = args[0] if args else kwargs.get("closure")
        if closure is None:
            require_backward(self._round)
        if not self.closes:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
                require_backward(self._round)
            self.hold_back()  # afterwards, as the closure's zero_grad() takes effect in the first micro-batch
            return loss
        self._is_inside = True
        try:
            return self._step(*args, **kwargs)
        finally:
            self._is_inside = False
            self.close()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Drops gradients before the first micro-batch and after the last.

        Raises:
            PolicyError: Gradients of a backward without a step() would be accumulated: a generator's, through the
                discriminator of a GAN.
        """
        if self.is_open:
            if self._round.backwards > self._backwards_at_call:
                raise PolicyError(DROPPED)
            return
        self._zero_grad(*args, **kwargs)

    def hold_back(self) -> None:
        """Counts a deferred update.

        Raises:
            PolicyError: The gradients were changed since backward.
        """
        self._gradients.require_untouched()
        self._calls += 1
        self._round.has_stepped = True
        self._backwards_at_call = self._round.backwards

    def close(self) -> None:
        """Ends the round: the next call starts another."""
        self._calls = 0

    def abandon(self) -> None:
        """Drops the gradients of a batch that the loop abandoned before its last micro-batch."""
        if self.is_open:
            self._zero_grad()
            self.close()

    def catch_up(self) -> None:
        """Updates at the end of a batch whose last part had no step()."""
        enough = min(self._round.micro_batches, self._round.count) - self._round.left_out
        if self.is_open and self._round.left_out and self._calls >= enough:
            self._is_inside = True
            try:
                self._step()
            finally:
                self._is_inside = False
                self.close()
            self._zero_grad()

    def require_micro_batches(self) -> None:
        """Checks that the loop receives micro-batches.

        Raises:
            PolicyError: It does not; the message gives the reason and what to do.
        """
        current = self._round
        if current.split and not current.trains_in_evaluation():
            return
        if self._whole_allowed and not current.split:
            self._whole_allowed -= 1
            return
        if current.handed or current.reason:
            why = f"its batches are not split, as {current.reason or 'their size is unknown'}"
        else:
            why = "its loop reads from no DataLoader"
        raise PolicyError(left_whole(why, current.micro_batches))


def refuse_many_evaluations(optimizer: torch.optim.Optimizer) -> None:
    """Rejects an optimizer that evaluates its closure many times.

    Raises:
        PolicyError: It does.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise PolicyError(LBFGS)


class Gates:
    """The gates of all optimizers of a job, including those created later, while they live."""

    def __init__(self, undo: ExitStack, current: Round) -> None:
        self._undo = undo
        self.round = current
        self.gradients = Gradients(self._parameters, current)
        #: Keyed by the optimizer's id; the gate itself is owned by its optimizer, whose step it replaces.
        self._gates: weakref.WeakValueDictionary[int, OptimizerGate] = weakref.WeakValueDictionary()
        current.on_abandoned(self._abandon)
        current.on_next(self._catch_up)

    def __iter__(self) -> Iterator[OptimizerGate]:
        return iter(list(self._gates.values()))

    def of(self, optimizer: Any) -> OptimizerGate | None:
        """Returns the gate of an optimizer."""
        gate = self._gates.get(id(optimizer))
        return gate if gate is not None and gate.optimizer is optimizer else None

    @property
    def is_open(self) -> bool:
        """Whether a round is in progress."""
        return any(gate.is_open for gate in self)

    @property
    def closes(self) -> bool:
        """Whether a step now would update."""
        return any(gate.closes for gate in self)

    def add(self, optimizer: torch.optim.Optimizer, *, is_first_whole: bool = False) -> None:
        """Starts deferring an optimizer's calls.

        Raises:
            PolicyError: It evaluates its closure many times.
        """
        refuse_many_evaluations(optimizer)
        gate = OptimizerGate(optimizer, self.round, self.gradients, is_first_whole=is_first_whole)
        gate.install()
        self._gates[id(optimizer)] = gate

    def watch(self) -> None:
        """Also gates optimizers created later: by their class, by deepcopy, by pickle."""
        gates = self

        def wrap(before: Any) -> Any:
            def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
                before(optimizer, *args, **kwargs)
                if gates.of(optimizer) is None:
                    gates.add(optimizer)

            return made

        for name in ("__init__", "__setstate__"):
            self._undo.callback(replace(torch.optim.Optimizer, name, wrap))

    def remove(self) -> None:
        """Restores every call."""
        for gate in self:
            gate.remove()

    def drop(self, optimizer: torch.optim.Optimizer) -> None:
        """Restores an optimizer's calls."""
        gate = self.of(optimizer)
        if gate is not None:
            del self._gates[id(optimizer)]
            gate.remove()

    def _parameters(self) -> list[torch.Tensor]:
        return [each for gate in self for group in gate.optimizer.param_groups for each in group["params"]]

    def _abandon(self) -> None:
        for gate in self:
            gate.abandon()

    def _catch_up(self) -> None:
        for gate in self:
            gate.catch_up()
