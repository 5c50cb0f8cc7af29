"""Skips calls of models that repeat an earlier one: their results, memory and gradients appear, nothing is run."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from memprof.recorder.memory.tensor_memory import parameters_of
from memprof.virtual.repeats.meter import REPEATED, Meter
from memprof.virtual.repeats.results import Backwards, Entry, Result, Shape, describe_result
from memprof.virtual.repeats.signature import (
    Surroundings,
    UnlikeError,
    arguments_key,
    gradients_key,
    modes_key,
    owned_by,
    state_key,
)

if TYPE_CHECKING:
    from memprof.virtual.mode import DryMode

#: Calls since the last update that are told apart: the first fills caches of autocast, and creates gradients.
_MOST_PLACES = 8
#: A model of which so many calls were run and none repeated another is left to its parts.
_MOST_UNLIKE = 12


class CallRepeats:
    """Runs the calls of modules, or skips them.

    Attributes:
        skipped: Calls that were skipped.
        is_on: Whether any is skipped or measured.
    """

    def __init__(self, mode: DryMode, meter: Meter, notice: Callable[[torch.Tensor], None]) -> None:
        """Knows no call yet.

        Args:
            mode: The dry run's mode.
            meter: Counts live bytes.
            notice: Logs the memory of a tensor that no operator returns.
        """
        self._notice = notice
        self.refuse = mode.refuse
        self.skipped = 0
        self.is_on = False
        self._mode = mode
        self._meter = meter
        self._backwards = Backwards(meter)
        self._surroundings = Surroundings()
        self._entries: dict[Hashable, Entry] = {}
        self._unlike: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._is_inside = False

    def install(self) -> None:
        """Wraps what torch calls for each call of a module."""
        kind: Any = torch.nn.Module
        original = kind._call_impl

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside or not self.is_on or torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            return self.run(original, module, args, kwargs)

        kind._call_impl = call

    def end_update(self) -> None:
        """Notes that an optimizer has updated: the next call is the first again."""
        self._places.clear()

    def run(self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Runs a call, or skips it."""
        is_apart = torch._C._current_graph_task_id() != -1 or torch._C._get_tracing_state() is not None
        is_apart = is_apart or sys.getprofile() is not None  # the job's own profiler would miss what is skipped
        if is_apart or self._unlike.get(id(module), 0) > _MOST_UNLIKE:
            return original(module, *args, **kwargs)
        place = self._places.get(id(module), 0)
        self._places[id(module)] = min(place + 1, _MOST_PLACES)
        try:
            given, tensors = arguments_key(args, kwargs)
            parameters = [each for each in parameters_of(module) if each.requires_grad]
            gradients = gradients_key(parameters) if torch.is_grad_enabled() else ()
            state = state_key(module)
            outside = self._surroundings.key(owned_by(module))
            key = (id(module), place, given, modes_key(), gradients, state, outside)
        except UnlikeError:
            return original(module, *args, **kwargs)
        entry = self._entries.setdefault(key, Entry())
        if entry.is_sure:
            self.skipped += 1
            return self._repeat(entry, [*tensors, *parameters] if torch.is_grad_enabled() else [], len(tensors))
        return self._measure(original, module, args, kwargs, entry, (tensors, parameters, (state, outside)))

    def _measure(
        self,
        original: Callable[..., Any],
        module: torch.nn.Module,
        args: Any,
        kwargs: Any,
        entry: Entry,
        given: tuple[list[torch.Tensor], list[torch.Tensor], tuple[Hashable, Hashable]],
    ) -> Any:
        tensors, parameters, (state, outside) = given
        mode, meter = self._mode, self._meter
        reads, drawn = mode.answers.reads, mode.random.note()
        python = random.getstate()
        watch = meter.begin()
        self._is_inside = True
        try:
            out = (
                original(module, *args, **kwargs)
                if entry.times
                else self._surroundings.learn(lambda: original(module, *args, **kwargs))
            )
        finally:
            self._is_inside = False
            meter.end(watch)
            draws = mode.random.end_note(drawn)
        self._unlike[id(module)] = self._unlike.get(id(module), 0) + (entry.result is None)
        is_alike = draws is not None and reads == mode.answers.reads and python == random.getstate()
        try:
            is_alike = is_alike and state == state_key(module)
            is_alike = is_alike and (not entry.times or outside == self._surroundings.key(owned_by(module)))
        except UnlikeError:
            is_alike = False
        result = None
        if is_alike:
            owned = [*tensors, *parameters_of(module), *parameters_of(module, buffers=True)]
            result = describe_result(out, owned, watch, meter.live_bytes)
        if result is None:
            entry.result, entry.times = None, 0
            self._unlike[id(module)] += 2
            return out
        is_same = result == entry.result
        entry.times = entry.times + 1 if is_same else 1
        entry.of_backward = entry.of_backward if is_same else 0
        entry.result, entry.draws = result, draws or []
        self._follow(out, entry, parameters)
        return out

    def _follow(self, out: Any, entry: Entry, parameters: list[torch.Tensor]) -> None:
        """Measures the backward of a call that was run."""
        is_begun = is_twice = False

        def note(excess_bytes: int) -> None:
            receives = tuple(each.grad is not None for each in parameters)
            # Gradients of gradients, and `torch.autograd.grad`, which fills none: not followed.
            entry.is_apart = entry.is_apart or is_twice or (bool(parameters) and not any(receives))
            is_same = (excess_bytes, receives) == (entry.backward_bytes, entry.receives)
            entry.of_backward = entry.of_backward + 1 if is_same else 1
            entry.backward_bytes, entry.receives = excess_bytes, receives

        def begin(_: Any) -> None:
            nonlocal is_begun, is_twice
            is_twice = is_twice or torch.is_grad_enabled()
            if not is_begun:
                is_begun = True
                self._backwards.begin(note)

        for leaf in tree_flatten(out)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(begin)

    def _repeat(self, entry: Entry, inputs: list[torch.Tensor], count: int) -> Any:
        assert entry.result is not None
        result = entry.result
        for draw in entry.draws:
            draw()
        shapes = [leaf for leaf in result.leaves if isinstance(leaf, Shape)]
        is_differentiable = any(shape.requires_grad for shape in shapes)
        if is_differentiable:
            made = _Repeated.apply(self, entry, shapes, count, *inputs)  # type: ignore[no-untyped-call]
        else:
            REPEATED(result.excess_bytes)
            made = self._make_all(result, shapes)
        remaining = iter(made)
        leaves = []
        for leaf in result.leaves:
            if isinstance(leaf, Shape):
                tensor = next(remaining)
                for name, value in leaf.marks:
                    setattr(tensor, name, value)
                leaves.append(tensor)
            else:
                leaves.append(leaf)
        return tree_unflatten(leaves, result.spec)

    def _make_all(self, result: Result, shapes: list[Shape]) -> tuple[torch.Tensor, ...]:
        made: dict[int, torch.Tensor] = {}
        for shape in shapes:
            if shape.storage not in made:
                made[shape.storage] = self.make((result.storages[shape.storage] // shape.dtype.itemsize,), shape.dtype)
        return tuple(made[each.storage].as_strided(each.size, each.stride, each.offset) for each in shapes)

    def make(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a new tensor on the device of the run."""
        if self._mode.place.type != "cpu":
            return torch.empty(size, dtype=dtype, device=self._mode.place)
        return self._make_quietly(lambda: torch.empty(size, dtype=dtype, device="meta"))

    def make_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a new gradient."""
        if self._mode.place.type != "cpu":
            return torch.empty_like(tensor, requires_grad=False)
        size, stride, dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        return self._make_quietly(lambda: torch.empty_strided(size, stride, dtype=dtype, device="meta"))

    def _make_quietly(self, create: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns a fake tensor whose allocation is logged without an operator, in a fifth of its time."""
        unseen: Any = torch._C._DisableTorchDispatch()
        with unseen:
            made: torch.Tensor = FakeTensor(self._mode, create(), self._mode.place)
            self._notice(made)
        return made

    def begin_backward(self, excess_bytes: int) -> None:
        """Stands for the backward of a call that was skipped, whose peak may include other calls' after it."""
        self._backwards.end()
        REPEATED(excess_bytes)


class _Repeated(torch.autograd.Function):
    """A call that was skipped."""

    @staticmethod
    def forward(
        ctx: Any, repeats: CallRepeats, entry: Entry, shapes: list[Shape], count: int, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Returns its results, and keeps as much memory as it saves for backward."""
        result = entry.result
        assert result is not None
        REPEATED(result.excess_bytes)
        made = repeats._make_all(result, shapes)
        # Its inputs, too: most models save them, and which is not known.
        ctx.saved = [repeats.make((result.saved_bytes,), torch.uint8), *inputs[:count]]
        ctx.repeats, ctx.entry, ctx.count = repeats, entry, count
        ctx.inputs = [
            (each.requires_grad, each if each.is_leaf else None, tuple(each.shape), each.dtype) for each in inputs
        ]
        ctx.mark_non_differentiable(*(one for one, each in zip(made, shapes, strict=True) if not each.requires_grad))
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Returns gradients: those of parameters that have none yet, and of all other inputs."""
        repeats, entry = ctx.repeats, ctx.entry
        repeats.begin_backward(entry.backward_bytes)
        if torch.is_grad_enabled():
            repeats.refuse(
                "this job takes gradients of gradients through a call that --whole skipped: dry-run it without --whole."
            )
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.saved.clear()
        found: list[torch.Tensor | None] = []
        for number, (requires_grad, leaf, shape, dtype) in enumerate(ctx.inputs):
            is_due = requires_grad
            if number >= ctx.count:
                is_due = entry.receives[number - ctx.count] and leaf is not None and leaf.grad is None
            if not is_due:
                found.append(None)
            else:
                found.append(repeats.make(shape, dtype) if leaf is None else repeats.make_like(leaf))
        return (None, None, None, None, *found)
