"""Skips an optimizer's updates that repeat an earlier one; its counters advance."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from memprof.virtual.repeats.counters import Conditions, Counter, Place, numbers_of
from memprof.virtual.repeats.meter import REPEATED, Meter
from memprof.virtual.repeats.signature import Surroundings, UnlikeError, Values, gradients_key
from memprof.virtual.values.answers import Answers
from memprof.virtual.values.overwritten import stand_in

_OWN = "torch.optim."
#: Optimizers of torch whose updates depend on how many there were, by numbers that they read from tensors.
_CHANGING = ("RAdam", "LBFGS")


@dataclass
class _Path:
    """One way that an update took.

    Attributes:
        key: What was the same.
        conditions: Conditions on counters.
        excess_bytes: Its peak beyond the live bytes before it.
        times: How often it was run with this peak, and left the live bytes as they were.
    """

    key: Hashable
    conditions: Conditions
    excess_bytes: int
    times: int = 1


@dataclass
class _Known:
    """What is known of one optimizer.

    Attributes:
        optimizer: It, so that no other gets its identity.
        paths: The ways that its updates took.
        places: Its counters.
        steps: By how much each counter rises with an update.
    """

    optimizer: Any
    paths: list[_Path] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


class UpdateRepeats:
    """Runs the updates of all optimizers, or skips them.

    Attributes:
        skipped: Updates that were skipped.
        is_on: Whether any is skipped or measured.
    """

    def __init__(self, meter: Meter, answers: Answers, after: Callable[[], None]) -> None:
        """Knows no optimizer yet.

        Args:
            meter: Counts live bytes.
            answers: Counts the values that are read.
            after: Called after each update.
        """
        self.skipped = 0
        self.is_on = False
        self._meter = meter
        self._answers = answers
        self._after = after
        self._known: dict[int, _Known] = {}
        self._surroundings = Surroundings()
        self._is_inside = False

    def install(self) -> None:
        """Wraps the ``step`` of each class of optimizers, once it has an instance."""
        kind: Any = torch.optim.Optimizer
        hooked = kind.profile_hook_step

        def hook(function: Callable[..., Any]) -> Any:
            def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                return self.run(function, optimizer, args, kwargs)

            return hooked(step)

        kind.profile_hook_step = staticmethod(hook)

    def run(self, function: Callable[..., Any], optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Runs an update, or skips it."""
        is_watched = self._is_inside or torch._C._current_graph_task_id() != -1 or sys.getprofile() is not None
        if is_watched or not self.is_on or args or kwargs:
            return function(optimizer, *args, **kwargs)
        known = self._known.setdefault(id(optimizer), _Known(optimizer))
        self._is_inside = True
        try:
            key = self._key(optimizer)
            path = self._path(known, key) if key is not None else None
            if key is None:
                return function(optimizer)
            if path is not None and path.times > 1:
                self._skip(optimizer, known, path)
                return None
            return self._measure(function, optimizer, known, key, path)
        finally:
            self._is_inside = False
            self._after()

    def _key(self, optimizer: Any) -> Hashable:
        """Returns what decides an update besides counters; None if its updates cannot be compared."""
        try:
            key = _key_of(optimizer)
            if type(optimizer).__module__.startswith(_OWN):
                return key
            owned = {id(each) for group in optimizer.param_groups for each in group["params"]} | {id(optimizer)}
            return key, _others_of(optimizer, owned), self._surroundings.key(owned)
        except UnlikeError:
            return None

    def _path(self, known: _Known, key: Hashable) -> _Path | None:
        values = [int(table.get(name, 0)) for table, name in known.places]
        return next((each for each in known.paths if each.key == key and each.conditions.hold(values)), None)

    def _skip(self, optimizer: Any, known: _Known, path: _Path) -> None:
        self.skipped += 1
        REPEATED(path.excess_bytes)
        for (table, name), step in zip(known.places, known.steps, strict=True):
            table[name] = int(table[name]) + step
        unseen: Any = torch._C._DisableTorchDispatch()
        with unseen, torch.no_grad():
            for state in optimizer.state.values():
                count = state.get("step") if isinstance(state, dict) else None
                if type(count) is torch.Tensor and count.device.type == "cpu" and stand_in(count) is None:
                    count += 1

    def _measure(
        self, function: Callable[..., Any], optimizer: Any, known: _Known, key: Hashable, path: _Path | None
    ) -> Any:
        before, noted, reads = numbers_of(optimizer), Conditions(), self._answers.reads
        is_own = type(optimizer).__module__.startswith(_OWN)
        if not is_own:
            for number, (table, name) in enumerate(known.places):
                table[name] = Counter.make(int(table[name]), number, noted)
        watch = self._meter.begin()
        try:
            is_new = not is_own and path is None
            result = self._surroundings.learn(lambda: function(optimizer)) if is_new else function(optimizer)
        finally:
            self._meter.end(watch)
            after = numbers_of(optimizer)
            for (table, name), value in after.values():
                if isinstance(table[name], Counter):
                    table[name] = value
        changed = {each: after[each][1] - before[each][1] for each in after if each in before}
        changed = {each: change for each, change in changed.items() if change}
        places, steps = [after[each][0] for each in changed], [*changed.values()]
        is_same = [(id(table), name) for table, name in places] == [(id(table), name) for table, name in known.places]
        is_alike = is_same and steps == known.steps and set(before) == set(after)
        if not is_alike:
            known.paths, known.places, known.steps = [], places, steps
        reads_values = self._answers.reads != reads and not is_own
        is_settled = self._meter.live_bytes == watch.start_bytes and result is None and key == self._key(optimizer)
        if is_alike and is_settled and noted.is_known and not reads_values:
            if path is not None and path in known.paths and path.excess_bytes == watch.excess_bytes:
                path.times += 1
                path.conditions.found.update(noted.found)
            else:
                known.paths.append(_Path(key, noted, watch.excess_bytes))
        return result


def _others_of(optimizer: Any, owned: set[int]) -> Hashable:
    """Returns the attributes of an optimizer besides counters, state and groups.

    Raises:
        UnlikeError: One cannot be compared.
    """
    values, left_out = Values(owned), {"state", "param_groups"}
    return tuple(
        (name, values.key(value))
        for name, value in vars(optimizer).items()
        if name not in left_out and (type(value) is bool or not isinstance(value, int))
    )


def _key_of(optimizer: Any) -> Hashable:
    """Returns what decides an update besides counters.

    Raises:
        UnlikeError: Its updates are never alike.
    """
    if type(optimizer).__name__ in _CHANGING and type(optimizer).__module__.startswith(_OWN):
        raise UnlikeError
    groups = []
    for group in optimizer.param_groups:
        plain = tuple((name, value) for name, value in group.items() if isinstance(value, (bool, str, type(None))))
        zeros = tuple((name, value == 0) for name, value in group.items() if type(value) is float)
        own = tuple((id(each), each.shape, each.dtype) for each in group["params"])
        groups.append((plain, zeros, own, gradients_key(group["params"])))
    sizes = tuple(len(state) if isinstance(state, dict) else 0 for state in optimizer.state.values())
    return tuple(groups), sizes
