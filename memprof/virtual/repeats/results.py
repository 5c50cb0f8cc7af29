"""What calls of models have in common: results, memory, gradients, and the peaks of their backwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten

from memprof.virtual.repeats.meter import Meter, Watch
from memprof.virtual.repeats.signature import is_plain
from memprof.virtual.values.answers import carry_marks
from memprof.virtual.values.known import known

#: A call that seems to repeat another was measured so often.
_ENOUGH = 2


@dataclass(frozen=True)
class Shape:
    """A tensor that a call returns."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage: int
    requires_grad: bool
    marks: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Result:
    """What a call returns and leaves in memory.

    Attributes:
        spec: Structure of the result.
        leaves: Its tensors, and plain values.
        storages: Bytes of the tensors' storages.
        saved_bytes: Bytes that remain for backward besides these.
        excess_bytes: Peak of the call beyond the live bytes before it.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]
    storages: tuple[int, ...]
    saved_bytes: int
    excess_bytes: int


@dataclass
class Entry:
    """What calls with one key have in common.

    Attributes:
        result: That of the last one.
        backward_bytes: Peak of its backward beyond the live bytes at its start; -1 without one.
        receives: Which parameters had a gradient after it.
        draws: Random numbers that it draws.
        times: How many calls in a row were alike.
        of_backward: How many of their backwards were.
        is_apart: Whether it is never skipped, as its backward is not followed.
    """

    result: Result | None = None
    backward_bytes: int = -1
    receives: tuple[bool, ...] = ()
    draws: list[Callable[[], Any]] = field(default_factory=list)
    times: int = 0
    of_backward: int = 0
    is_apart: bool = False

    @property
    def is_sure(self) -> bool:
        """Whether a call may be skipped."""
        if self.is_apart or self.result is None or self.times < _ENOUGH:
            return False
        return self.of_backward >= _ENOUGH or not any(
            isinstance(leaf, Shape) and leaf.requires_grad for leaf in self.result.leaves
        )


def describe_result(out: Any, owned: list[torch.Tensor], watch: Watch, live_bytes: int) -> Result | None:
    """Returns what a call returned; None if another call would return something else."""
    leaves, spec = tree_flatten(out)
    before = {each.untyped_storage()._cdata for each in owned if each.layout is torch.strided}
    places: dict[int, int] = {}
    sizes: list[int] = []
    found: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            if not is_plain(leaf):
                return None
            found.append(leaf)
            continue
        if type(leaf) is not FakeTensor or leaf.layout is not torch.strided or known(leaf) is not None:
            return None
        storage = leaf.untyped_storage()
        if storage._cdata in before or storage.nbytes() % leaf.dtype.itemsize:
            return None
        if storage._cdata not in places:
            places[storage._cdata] = len(sizes)
            sizes.append(storage.nbytes())
        found.append(
            Shape(
                tuple(leaf.shape),
                leaf.stride(),
                int(leaf.storage_offset()),
                leaf.dtype,
                places[storage._cdata],
                leaf.requires_grad,
                carry_marks(leaf),
            )
        )
    saved_bytes = live_bytes - watch.start_bytes - sum(sizes)
    is_graph = any(isinstance(each, Shape) and each.requires_grad for each in found)
    if saved_bytes < 0 or (saved_bytes and not is_graph):
        return None
    return Result(spec, tuple(found), tuple(sizes), saved_bytes, watch.excess_bytes)


class Backwards:
    """Measures the parts of a backward: each from the first gradient of a call's result to that of another's."""

    def __init__(self, meter: Meter) -> None:
        """Starts outside of any."""
        self._meter = meter
        self._open: tuple[Watch, Callable[[int], None]] | None = None
        self._task = -1

    def begin(self, note: Callable[[int], None]) -> None:
        """Begins a part, inside backward.

        Args:
            note: Receives its peak beyond the live bytes at its start.
        """
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._open, self._task = None, task
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.end)
        self.end()
        self._task = task
        self._open = self._meter.begin(), note

    def end(self) -> None:
        """Ends the part that is open."""
        if self._open is not None:
            (watch, note), self._open = self._open, None
            self._meter.end(watch)
            note(watch.excess_bytes)
