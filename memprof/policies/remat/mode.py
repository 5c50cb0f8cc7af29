"""Dispatch mode that makes room for every operator of the job and records the recipes of its outputs."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memprof.policies.remat.cells import Cell, Recipe, Ref
from memprof.policies.remat.memory import Memory
from memprof.policies.remat.needs import Needs, Operator
from memprof.policies.remat.recomputation import Recomputation, put_back, states_for
from memprof.policies.remat.saved import Keys
from memprof.policies.remat.sequence import Kind, Position, is_plain
from memprof.recorder.calls.dispatch_modes import (
    SlidingMode,
    follow,
    is_traced,
    leaves_operators,
    run_below,
    tensors_in,
    with_tensors,
)
from memprof.recorder.calls.torch_state import traced_inside, untraced
from memprof.recorder.calls.tracebacks import clean_uncaught, hide_frames_of
from memprof.recorder.memory.out_of_memory import is_out_of_memory

_Tensor = torch.Tensor
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_LISTS = (list, tuple)
_NOTHING: dict[str, Any] = {}
#: An operator's memory may grow with its inputs; after this many runs of a kind its measured need is reused.
_WATCHED_RUNS = 16
_now_ns = time.perf_counter_ns
_is_grad_enabled = torch.is_grad_enabled
_sequence_number = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node
_get_mode = torch._C._get_dispatch_mode
_tracing_state = torch._C._get_tracing_state
_FAKE = torch._C._TorchDispatchModeKey.FAKE

hide_frames_of(Path(__file__).parent)


class RematMode(SlidingMode):
    """Dispatch mode that stays below any mode of the job while it runs."""

    def __init__(self, memory: Memory, needs: Needs, recomputation: Recomputation, keys: Keys | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's base is not annotated
        self._memory = memory
        self._needs = needs
        self._recomputation = recomputation
        self._keys = keys
        self._operators: dict[int, Operator] = {}  # each holds a reference to its function, so the id stays unique
        self._lock = threading.RLock()  # backward on a device runs in its own threads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator."""
        try:
            return self._dispatch(func, types, args, kwargs)
        except BaseException as error:
            given = with_tensors(func, args) if isinstance(error, RuntimeError) else None
            if given is None:
                clean_uncaught()
                raise
        return self._dispatch(func, types, given, kwargs)

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self._recomputation.is_running or _get_mode(_FAKE) is not None:
            return func(*args, **kwargs) if kwargs else func(*args)
        for kind in types:
            if kind not in _PLAIN and not leaves_operators(kind):
                return NotImplemented
        operator = self._operators.get(id(func))
        if operator is None:
            operator = self._operators[id(func)] = Operator(func)
        if operator.is_higher_order:
            return self._run_higher_order(func, args, kwargs or {})
        if operator.is_view:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or _NOTHING
        with self._lock:
            memory = self._memory
            if memory.due:
                memory.drop_due()
            if _tracing_state() is None:
                is_recorded = operator.can_repeat and _is_grad_enabled()
                position = memory.sequence.advance(operator, args, kwargs, is_recorded)
                if position is not None:
                    return self._run(position, operator, func, args, kwargs)
            return self._run_unwatched(operator, func, args, kwargs)

    def _run_higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs the operators inside a higher-order one; if they are not visible, it may write all its arguments."""
        if is_traced():
            return run_below(func, args, kwargs)
        result = follow(self, func, args, kwargs)
        if result is not NotImplemented:
            return result
        given = [tensor for tensor in tensors_in((args, kwargs)) if is_plain(tensor)]
        with self._lock:
            for tensor in given:
                self._memory.before_write(tensor.untyped_storage())
            result = run_below(func, args, kwargs)
            for tensor in given:
                self._memory.changed(tensor.untyped_storage(), None)
        return result

    def _run_unwatched(self, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs operators that are not recomputed: under ``torch.jit.trace``, and on sparse or nested tensors."""
        with untraced():
            written = _written(operator, args, kwargs)
            for storage in written:
                self._memory.before_write(storage)
        with traced_inside(func):
            result = func(*args, **kwargs)
        with untraced():
            for storage in written:
                self._memory.changed(storage, None)
        return result

    def _run(self, position: Position, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
        memory, kind = self._memory, position.kind
        assert kind is not None
        need = kind.need
        recipe = self._recipe(kind, func, args, kwargs) if kind.has_recipe else None
        if self._keys is not None and _current_node() is None:
            name = self._keys.name(operator.name)
            if recipe is not None:
                recipe.key = name
        if operator.written_names and memory.cells:
            for storage in _written(operator, args, kwargs):
                memory.before_write(storage)
        if memory.schedule.observation is not None:
            memory.schedule.observe(need, operator.name, memory.counter.used_bytes())
        if memory.peak is not None:
            memory.peak.begins()
        if not need.is_measured and self._needs.must_measure(need):
            guess = self._needs.estimate_bytes(func, args, kwargs)
            memory.make_room(guess, operator.name, is_exact=False)
            learn = partial(self._needs.learn, need, guess, func, args, kwargs)
            try:
                result, cost_us = learn()
            except (RuntimeError, MemoryError) as error:
                result, cost_us = self._call_again(error, recipe, learn, 0)
            need.least_us = min(need.least_us, cost_us)
        else:
            if memory.counter.lacks_bytes(need.highest_bytes, memory.limit_bytes) > 0:
                memory.make_room(need.highest_bytes, operator.name, is_exact=need.is_measured)
            is_watched = need.runs < _WATCHED_RUNS
            if is_watched:
                before = memory.counter.used_bytes()
                start = _now_ns()
            try:
                result = func(*args, **kwargs) if kwargs else func(*args)
            except (RuntimeError, MemoryError) as error:
                result = self._call_again(error, recipe, partial(func, *args, **kwargs), need.highest_bytes)
            if is_watched:
                need.least_us = min(need.least_us, (_now_ns() - start) / 1000)
                need.runs += 1
                need.highest_bytes = max(need.highest_bytes, memory.counter.used_bytes() - before)
        if memory.peak is not None:
            memory.peak.ran(need)
        memory.clock_us += need.least_us
        memory.first_us += need.least_us
        if recipe is not None:
            self._note(operator, recipe, args, result)
        elif operator.written_names and memory.cells:
            for storage in _written(operator, args, kwargs):
                memory.changed(storage, None)
        return result

    def _call_again(self, error: BaseException, recipe: Recipe | None, call: Callable[[], Any], need_bytes: int) -> Any:
        """Retries an operator after an out-of-memory error, each time with more contents dropped."""
        memory = self._memory
        while is_out_of_memory(error) and (victim := memory.next_victim()) is not None:
            freed = 0
            while victim is not None and freed <= need_bytes:
                freed += victim.size_bytes
                memory.drop(victim)
                victim = memory.next_victim()
            try:
                if recipe is not None:
                    put_back(recipe.random)
                return call()
            except (RuntimeError, MemoryError) as again:
                error = again.with_traceback(None)
        raise error

    # -- recipes --------------------------------------------------------------------------------------------------

    def _recipe(self, kind: Kind, func: Any, args: Any, kwargs: Any) -> Recipe:
        memory, operator = self._memory, kind.operator
        recipe = Recipe(func, kind.need, _sequence_number())
        cells: list[Cell] = []
        anchors: list[torch.UntypedStorage] = []
        if kind.is_flat:
            noted, cells_of = list(args), memory.cells
            for place, ref in kind.reads:
                tensor = args[place]
                storage = tensor.untyped_storage()
                cell = cells_of.get(storage._cdata) or memory.meet(storage)
                cells.append(cell)
                if cell.recipe is None:
                    anchors.append(storage)
                noted[place] = ref if tensor.storage_offset() == ref.offset else Ref(tensor)
            for place, blank in kind.blanks:
                noted[place] = blank
            if kwargs:
                recipe.kwargs = dict(kwargs)
        else:
            noted = [_noted(memory, value, cells, anchors) for value in args]
            recipe.kwargs = {name: _noted(memory, value, cells, anchors) for name, value in kwargs.items()} or None
        recipe.args = tuple(noted)
        recipe.inputs = tuple(cells)
        recipe.anchors = tuple(anchors)
        if operator.is_random:
            device = cells[0].device if cells else torch.device((kwargs or {}).get("device") or "cpu")
            recipe.random = states_for(kwargs, device)
        return recipe

    def _note(self, operator: Operator, recipe: Recipe, args: Any, result: Any) -> None:
        memory = self._memory
        reader = weakref.ref(recipe)
        for cell in recipe.inputs:
            cell.used_us = memory.clock_us
            cell.add_reader(reader)
        if operator.changes >= 0:
            storage = args[operator.changes].untyped_storage()
            before = memory.find(storage)
            if before is None or before.recipe is None:
                memory.changed(storage, None)
                return
            recipe.changes = before
            changed = memory.changed(storage, recipe)
            assert changed is not None
            recipe.outputs.append(weakref.ref(changed))
            return
        if operator.statistics is not None and operator.moves_statistics(args):
            for position in operator.statistics[:2]:
                if position is not None and position < len(args) and isinstance(args[position], _Tensor):
                    memory.changed(args[position].untyped_storage(), None)
        for number, value in enumerate(result) if type(result) in _LISTS else ((0, result),):
            if not isinstance(value, _Tensor) or not is_plain(value):
                continue
            storage = value.untyped_storage()
            if memory.find(storage) is not None:
                continue  # a view of an input
            cell = Cell(recipe, number, storage.nbytes(), storage.device)
            cell.used_us = memory.clock_us
            memory.place(cell, storage)
            if memory.schedule.observation is not None:
                memory.schedule.observation.made(cell, recipe)
            recipe.outputs.append(weakref.ref(cell))


def _noted(memory: Memory, value: Any, cells: list[Cell], anchors: list[torch.UntypedStorage]) -> Any:
    """Returns an argument as a recipe stores it; appends the cells of its tensors, and storages they depend on."""
    if isinstance(value, _Tensor):
        storage = value.untyped_storage()
        cell = memory.meet(storage)
        cells.append(cell)
        if cell.recipe is None:
            anchors.append(storage)
        return Ref(value)
    if type(value) in _LISTS:
        return [_noted(memory, item, cells, anchors) for item in value]
    return value


def _written(operator: Operator, args: Any, kwargs: Any) -> list[torch.UntypedStorage]:
    values = [args[position] for position in operator.written if position < len(args)]
    values += [kwargs[name] for name in operator.written_names if name in kwargs]
    items = [item for value in values for item in (value if type(value) in _LISTS else (value,))]
    return [item.untyped_storage() for item in items if isinstance(item, _Tensor) and is_plain(item)]
