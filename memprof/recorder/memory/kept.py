"""States which tensors Python holds more of than before, and through which variables, to explain memory that stays."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from memprof.recorder.calls.untraced import untraced
from memprof.recorder.clock import clock_ns
from memprof.recorder.log import RawLog
from memprof.recorder.memory.holders import Holder, find_holders
from memprof.recorder.memory.inventory import is_computed
from memprof.recorder.memory.live_objects import live_objects

#: Tensors that are followed, of all kinds together and of one, those of the kinds of most bytes first.
_MOST_TENSORS, _MOST_OF_A_KIND = 240, 96
#: Growth shows in this many recorded steps; with fewer, there is nothing to explain.
LEAST_STEPS = 3
#: A kind is followed if there are this many more than at the count before: one more is what a step leaves behind.
_LEAST_GROWTH = 2
#: In a recording of a whole run, statements take at most this share of the run, and begin in this step.
_SHARE_OF_RUN = 0.005
_FIRST_STEP = 8

#: Shape, element type and device of a tensor, and whether it has an autograd graph.
Kind = tuple[str, str, str, bool]
#: Returns address and bytes of a tensor's storage; address 0 for one without.
Span = Callable[[torch.Tensor], tuple[int, int]]


class KeptTensors:
    """Counts the tensors that Python holds, by kind, and writes what holds those that have become more."""

    def __init__(self, log: RawLog, span: Span) -> None:
        """Begins without a count.

        Args:
            log: Destination of the statements.
            span: Returns address and bytes of a tensor's storage.
        """
        self._log = log
        self._span = span
        self._counts: dict[Kind, int] | None = None
        self._began = time.monotonic()
        self._spent = 0.0
        self._last_step = 0

    @property
    def has_counted(self) -> bool:
        """Whether tensors have been counted: only then can a statement tell which became more."""
        return self._counts is not None

    def count(self) -> None:
        """Counts the tensors that there are, for the next statement to compare with."""
        with torch._C.DisableTorchFunction(), untraced():
            self._counts = {kind: len(alike) for kind, alike in self._by_kind().items()}

    def state_if_due(self, step: int) -> None:
        """Counts, and writes a statement, if the last one lies far enough back: ever more rarely over a run."""
        is_due = step >= max(_FIRST_STEP, self._last_step + self._last_step // 2)
        if is_due and self._spent <= _SHARE_OF_RUN * (time.monotonic() - self._began):
            self.state(step)

    def state(self, step: int) -> None:
        """Counts, and writes what holds the tensors of which there are more than at the count before.

        Args:
            step: The step that has just ended.
        """
        began = time.monotonic()
        self._last_step = step
        with torch._C.DisableTorchFunction(), untraced():
            records = self._records(step)
        if records:
            self._log.record("holders", records)
        self._spent += time.monotonic() - began

    def _records(self, step: int) -> list[dict[str, Any]]:
        kinds, before = self._by_kind(), self._counts
        self._counts = {kind: len(alike) for kind, alike in kinds.items()}
        if before is None:
            return []
        grown = [kind for kind, alike in kinds.items() if len(alike) - before.get(kind, 0) >= _LEAST_GROWTH]
        sizes = {kind: sum(self._span(tensor)[1] for tensor in kinds[kind]) for kind in grown}
        chosen: list[tuple[Kind, torch.Tensor]] = []
        for kind in sorted(grown, key=lambda one: -sizes[one]):
            # Those in the middle: a step's tensors lie beside each other, and the latest may be the current step's.
            most = min(_MOST_OF_A_KIND, _MOST_TENSORS - len(chosen))
            first = max(0, (len(kinds[kind]) - most) // 2)
            chosen += [(kind, tensor) for tensor in kinds[kind][first : first + most]]
        kinds.clear()
        if not chosen:
            return []
        now = clock_ns()
        held = find_holders([tensor for _, tensor in chosen])
        return [
            {
                "step": step,
                "time_ns": now,
                "address": self._span(tensor)[0],
                "tensors": self._counts[kind],
                "bytes": sizes[kind],
                **_described(kind, one),
            }
            for (kind, tensor), one in zip(chosen, held, strict=True)
        ]

    def _by_kind(self) -> dict[Kind, list[torch.Tensor]]:
        """Returns the tensors that Python holds, oldest first; not parameters and their gradients, nor views."""
        tensors = live_objects(torch.Tensor)
        gradients = {
            id(tensor.grad)
            for tensor in tensors
            if not is_computed(tensor) and tensor.requires_grad and tensor.grad is not None
        }
        kinds: dict[Kind, list[torch.Tensor]] = {}
        seen: set[int] = set()
        for tensor in tensors:
            if isinstance(tensor, torch.nn.Parameter) or id(tensor) in gradients or tensor.is_nested:
                continue
            address, size = self._span(tensor)
            if address and size and address not in seen:
                seen.add(address)
                shape = "x".join(str(int(length)) for length in tensor.shape)
                kind = (shape, str(tensor.dtype), str(tensor.device), is_computed(tensor))
                kinds.setdefault(kind, []).append(tensor)
        return kinds


def _described(kind: Kind, held: Holder) -> dict[str, Any]:
    variable = held.variable
    return {
        "shape": kind[0],
        "dtype": kind[1].removeprefix("torch."),
        "device": kind[2],
        "has_graph": kind[3],
        "kind": held.kind,
        "chain": held.chain,
        "container": held.container,
        "frame": "" if variable is None else variable.place,
    }
