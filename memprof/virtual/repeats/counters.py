"""Counters in an optimizer's state, and the conditions on them by which an update runs other operators."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

#: Where a counter is: the table that holds it, and its key there.
Place = tuple[MutableMapping[Any, Any], Any]
_KEPT = ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__mod__", "__floordiv__")
_ASKED = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")


@dataclass
class Conditions:
    """The conditions on counters that an update has evaluated, with their results.

    Attributes:
        is_known: Whether counters were used only in ways that are followed.
    """

    is_known: bool = True
    found: dict[tuple[int, tuple[tuple[str, Any], ...], str, Any], bool] = field(default_factory=dict)

    def hold(self, values: list[int]) -> bool:
        """Whether all have the same results for these values of the counters."""
        return all(
            _asked(_computed(values[place], steps), name, other) is result
            for (place, steps, name, other), result in self.found.items()
        )


def _computed(value: Any, steps: tuple[tuple[str, Any], ...]) -> Any:
    for name, other in steps:
        value = getattr(value, name)(other)
    return value


def _asked(value: Any, name: str, other: Any) -> bool:
    return bool(value) if name == "__bool__" else bool(getattr(operator, name)(value, other))


class Counter(int):
    """A counter whose conditions are noted."""

    place: int
    steps: tuple[tuple[str, Any], ...]
    noted: Conditions

    @classmethod
    def make(cls, value: int, place: int, noted: Conditions, steps: tuple[tuple[str, Any], ...] = ()) -> Counter:
        """Returns a counter.

        Args:
            value: Its value.
            place: Number of the counter that it was computed from.
            noted: Where conditions are noted.
            steps: How it was computed.
        """
        made = cls(value)
        made.place, made.steps, made.noted = place, steps, noted
        return made

    def __bool__(self) -> bool:
        """Whether it is not zero."""
        result = int(self) != 0
        self.noted.found[self.place, self.steps, "__bool__", None] = result
        return result

    def __hash__(self) -> int:
        """Returns the number's; what is looked up with it is not followed."""
        self.noted.is_known = False
        return hash(int(self))

    def __index__(self) -> int:
        """Returns the number; what is done with it is not followed."""
        self.noted.is_known = False
        return int(self)

    def __deepcopy__(self, memo: Any) -> int:
        """Returns the number."""
        return int(self)


def _kept(name: str) -> Callable[[Counter, Any], Any]:
    plain = getattr(int, name)

    def compute(self: Counter, other: Any) -> Any:
        result = plain(int(self), other)
        if result is NotImplemented:
            return result  # a float: schedules of rates, which decide no operator
        if type(other) is not int:
            self.noted.is_known = False
            return result
        return Counter.make(result, self.place, self.noted, (*self.steps, (name, other)))

    return compute


def _asking(name: str) -> Callable[[Counter, Any], Any]:
    def ask(self: Counter, other: Any) -> Any:
        if type(other) not in (int, float):
            self.noted.is_known = self.noted.is_known and not isinstance(other, int)
            return getattr(int, name)(int(self), other)
        result = bool(getattr(operator, name)(int(self), other))
        self.noted.found[self.place, self.steps, name, other] = result
        return result

    return ask


for _name in _KEPT:
    setattr(Counter, _name, _kept(_name))
for _name in _ASKED:
    setattr(Counter, _name, _asking(_name))


def tables_of(optimizer: Any) -> Iterator[MutableMapping[Any, Any]]:
    """Yields the tables of an optimizer's numbers: its own, its groups', its state's, those of objects in it."""
    yield vars(optimizer)
    yield from optimizer.param_groups
    for state in list(optimizer.state.values()):
        if isinstance(state, dict):
            yield state
            for value in list(state.values()):
                if hasattr(value, "__dict__") and not hasattr(value, "layout") and not callable(value):
                    yield vars(value)


def numbers_of(optimizer: Any) -> dict[tuple[int, Any], tuple[Place, int]]:
    """Returns the whole numbers in an optimizer's tables, by table and key."""
    return {
        (id(table), key): ((table, key), int(value))
        for table in tables_of(optimizer)
        for key, value in list(table.items())
        if isinstance(value, int) and not isinstance(value, bool)
    }
