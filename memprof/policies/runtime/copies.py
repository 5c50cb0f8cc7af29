"""Keeps a plan's changes to a module or an optimizer out of its copies and saved files."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: Methods that copy and pickle look up on the object before its type, so they can be replaced for a single object.
_REDUCE = "__reduce_ex__"
_DEEPCOPY = "__deepcopy__"
_REPLICATE = "_replicate_for_data_parallel"

#: Methods of torch and Python that create the state of a copy from the object's ``__dict__`` alone.
_USUAL_STATES = {getattr(kind, "__getstate__", None) for kind in (object, torch.nn.Module)}


class CopyGuard:
    """Handles copying and saving of one object.

    Copies, files and replicas are the job's own: without the entries that a plan added to the object's ``__dict__``,
    with the job's original entries, and with values in the job's own memory. The entries in ``__dict__`` are bound
    methods, as Python would create them: if anything other than copy and pickle copies an entry, it is bound to the
    copy, and detects that this is not the object it was created for.

    Attributes:
        owner: The module or the optimizer.
        changes: Functions that change the state of a copy, a dict of its own.
        after: Called when a copy is made.
        forward: The planned forward of a module, None where it has none.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.changes: list[Callable[[dict[str, Any]], None]] = []
        self.after: list[Callable[[], Any]] = []
        self.forward: Any = None
        self._entries: list[tuple[str, Any, Any]] = []  # name, our function, and the previous entry
        self._users = 0
        self.put(_REDUCE, _reducing(self))
        if hasattr(type(owner), _DEEPCOPY):
            self.put(_DEEPCOPY, _deepcopying(self))
        if hasattr(type(owner), _REPLICATE):
            self.put(_REPLICATE, _replicating(self))

    @staticmethod
    def find(owner: Any) -> CopyGuard | None:
        """Returns the guard of an object, None without one."""
        function = getattr(vars(owner).get(_REDUCE), "__func__", None)
        guard = getattr(function, "guard", None)
        return guard if isinstance(guard, CopyGuard) and guard.owner is owner else None

    @staticmethod
    def of(owner: Any) -> CopyGuard:
        """Returns the guard of an object, a new one where it has none; each call needs a ``release``."""
        guard = CopyGuard.find(owner) or CopyGuard(owner)
        guard._users += 1
        return guard

    def release(self) -> None:
        """Restores the object once nothing uses the guard any more."""
        self._users -= 1
        if not self._users:
            for _, function, _ in reversed(list(self._entries)):
                self.take(function)

    def put(self, name: str, function: Any) -> None:
        """Adds a method to the object's ``__dict__``.

        Args:
            name: Its name.
            function: Takes the object as its first argument; it may be given another, a copy.
        """
        self._entries.append((name, function, vars(self.owner).get(name)))
        vars(self.owner)[name] = types.MethodType(function, self.owner)

    def take(self, function: Any) -> None:
        """Removes a method, unless the job has replaced it since."""
        entry = next(entry for entry in self._entries if entry[1] is function)
        self._entries.remove(entry)
        _restore(vars(self.owner), *entry)

    def reduce(self, given: Any, protocol: Any) -> Any:
        """Returns the reduced form that copy and pickle build a copy from."""
        self._prepare(given)
        kind: Any = type(given)
        if _is_usual(kind):
            reduced = kind.__reduce_ex__(given, protocol)
        else:
            # A type with its own copy method may store the entries of __dict__ anywhere.
            with self._cleared(given):
                reduced = kind.__reduce_ex__(given, protocol)
        if not isinstance(reduced, tuple):
            return reduced
        parts = list(reduced)
        if len(parts) > 2:
            parts[2] = self._cleaned(given, parts[2])
        return tuple(parts)

    def deepcopy(self, given: Any, memo: Any) -> Any:
        """Returns the deep copy created by the object's type."""
        self._prepare(given)
        with self._cleared(given):
            return type(given).__deepcopy__(given, memo)

    def replicate(self, given: Any) -> Any:
        """Returns a replica, which shares everything but the plan's entries."""
        self._prepare(given)
        replica = type(given)._replicate_for_data_parallel(given)
        self._clean(given, vars(replica))
        return replica

    def _prepare(self, given: Any) -> None:
        if given is self.owner:
            for act in self.after:
                act()

    def _cleaned(self, given: Any, state: Any) -> Any:
        """Returns a copy's state without the plan's entries: a dict, or a tuple of one and the values of slots."""
        if isinstance(state, tuple) and state and isinstance(state[0], dict):
            return self._cleaned(given, state[0]), *state[1:]
        if not isinstance(state, dict):
            return state
        state = dict(state)
        self._clean(given, state)
        return state

    def _clean(self, given: Any, state: dict[str, Any]) -> None:
        for name, function, own in reversed(self._entries):  # the last one first
            _restore(state, name, function, rebound(own, self.owner, given))
        if given is self.owner:
            for change in self.changes:
                change(state)

    @contextmanager
    def _cleared(self, given: Any) -> Iterator[None]:
        """Strips the plan's entries from the object itself while it is copied."""
        state = vars(given)
        before = dict(state)
        self._clean(given, state)
        try:
            yield
        finally:
            state.update(before)


def _is_usual(kind: Any) -> bool:
    """Returns whether objects of a type are copied by their ``__dict__`` alone."""
    base: Any = object
    is_reduced_so = kind.__reduce__ is base.__reduce__ and kind.__reduce_ex__ is base.__reduce_ex__
    return is_reduced_so and getattr(kind, "__getstate__", None) in _USUAL_STATES


def rebound(value: Any, owner: Any, given: Any) -> Any:
    """Returns a method of one object as the same method of another; anything else as it is."""
    if isinstance(value, types.MethodType) and value.__self__ is owner and given is not owner:
        return types.MethodType(value.__func__, given)
    return value


def _restore(state: dict[str, Any], name: str, function: Any, own: Any) -> None:
    if name in state and getattr(state[name], "__func__", None) is function:
        if own is None:
            del state[name]
        else:
            state[name] = own


def _reducing(guard: CopyGuard) -> Any:
    @functools.wraps(object.__reduce_ex__)
    def __reduce_ex__(self: Any, protocol: Any) -> Any:  # noqa: N807 - it becomes the method of that name
        return guard.reduce(self, protocol)

    __reduce_ex__.guard = guard  # type: ignore[attr-defined]
    return __reduce_ex__


def _deepcopying(guard: CopyGuard) -> Any:
    @functools.wraps(type(guard.owner).__deepcopy__)
    def __deepcopy__(self: Any, memo: Any) -> Any:  # noqa: N807 - as above
        return guard.deepcopy(self, memo)

    return __deepcopy__


def _replicating(guard: CopyGuard) -> Any:
    @functools.wraps(type(guard.owner)._replicate_for_data_parallel)
    def _replicate_for_data_parallel(self: Any) -> Any:
        return guard.replicate(self)

    return _replicate_for_data_parallel
