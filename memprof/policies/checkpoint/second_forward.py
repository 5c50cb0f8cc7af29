"""What a region's second forward needs: outputs that are kept, and arguments that the first one changed.

A forward that runs again must find them as its first run did; otherwise the keys are appended twice. Lists,
dictionaries and attributes are compared before and after the first run, and entries that it has changed are put back
while the forward runs again. So are the states of the job's own random generators: torch restores its default ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import getattr_static, unwrap
from types import FunctionType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memprof.policies.checkpoint.kinds import KeptOperators
from memprof.policies.remat.recomputation import restored, state_of

_Container = dict[Any, Any] | list[Any]
#: Most containers that are compared: beyond are objects that hold the job itself.
_MOST = 10_000
_ABSENT = object()


def selective_contexts(keep: KeptOperators) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts of the first run and of the recompute."""
    calls: Counter[tuple[bool, str]] = Counter()

    def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(operator)
        calls[context.is_recompute, name] += 1  # some versions of torch ask again in the recompute
        # An operator that drew random numbers must draw them again, or those after it would get different ones.
        if keep.has(name, calls[context.is_recompute, name]) and not _drops_out(operator, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts: Any = create_selective_checkpoint_contexts
    before, again = contexts(decide)
    for mode in (before, again):
        kind: Any = type(mode)
        mode.__class__ = _only_kept(kind, keep.names)
    return before, again


@cache
def _only_kept(kind: Any, names: frozenset[str]) -> Any:
    """Makes torch's modes of both runs look at kept operators only, which is also faster.

    Torch's modes count every operator, and the second raises where one runs more often than in forward. That is
    legitimate under autocast: a module's second call reuses cached weight casts, but its recomputation casts them
    again.
    """
    kept = frozenset(operator for name in names if (operator := operator_named(name)) is not None)

    class OnlyKept(kind):  # type: ignore[misc]  # torch's class is private
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in kept:
                return super().__torch_dispatch__(func, types, args, kwargs)
            return func(*args, **(kwargs or {}))

    return OnlyKept


def operator_named(name: str) -> Any:
    """Returns an operator of torch by its name in the dispatcher; None where this version has none of that name."""
    operator: Any = torch.ops
    for part in name.split("."):
        operator = getattr(operator, part, None)
    return operator if isinstance(operator, torch._ops.OpOverload) else None


def _drops_out(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call of an attention operator applies dropout."""
    for position, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            value = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(value)
    return False


@dataclass(frozen=True)
class _Changed:
    """Entries of a container that the first run changed.

    Attributes:
        container: The container.
        before: What they were, by key or index; ``_ABSENT`` for keys that were not there.
        length: Length of a list before.
    """

    container: _Container
    before: dict[Any, Any]
    length: int


class Arguments:
    """The objects reachable from a region's arguments, and what its first run has changed of them."""

    def __init__(self, values: list[Any], modules: Iterable[torch.nn.Module]) -> None:
        """Notes the contents of containers in arguments other than tensors, and the states of random generators."""
        self._states = tuple((one, state_of(one)) for one in _generators(values, modules))
        self._noted = list(_contents(values))
        self._changed: list[_Changed] = []

    def compare(self) -> None:
        """Keeps what the first run has changed, and nothing else of the contents."""
        self._changed = [change for noted in self._noted if (change := _changes(*noted)) is not None]
        self._noted = []

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Puts back what the first run has changed; afterwards everything is as it was on entry."""
        now = [(change.container, change.container.copy()) for change in self._changed]
        try:
            for change in self._changed:
                _put_back(change)
            with restored(self._states):
                yield
        finally:
            for container, contents in now:
                _fill(container, contents)


def _generators(values: list[Any], modules: Iterable[torch.nn.Module]) -> set[torch.Generator]:
    """Returns the generators among arguments, attributes of modules, and globals that a forward names."""
    found = list(values)
    for module in modules:
        forward = unwrap(getattr_static(type(module), "forward", None))  # scripted modules' descriptor raises
        found += vars(module).values()
        if isinstance(forward, FunctionType):
            found += map(forward.__globals__.get, forward.__code__.co_names)
    return {one for one in found if isinstance(one, torch.Generator)}


def _contents(values: Iterable[Any]) -> Iterator[tuple[_Container, _Container]]:
    """Lists the containers reachable from values, each with a copy: lists, dictionaries, and attributes of objects."""
    waiting, seen = list(values), set[int]()
    while waiting and len(seen) < _MOST:
        value = waiting.pop()
        if isinstance(value, torch.Tensor) or callable(value):  # modules and functions are callable, too
            continue
        if isinstance(value, tuple):
            waiting += value
            continue
        container = value if isinstance(value, (dict, list)) else getattr(value, "__dict__", None)
        if not isinstance(container, (dict, list)) or id(container) in seen:
            continue
        seen.add(id(container))
        yield container, container.copy()
        waiting += container.values() if isinstance(container, dict) else container


def _changes(container: _Container, before: _Container) -> _Changed | None:
    if isinstance(container, dict):
        keys = {**before, **container}  # type: ignore[dict-item]  # a copy of it
        changed = {
            key: before.get(key, _ABSENT)  # type: ignore[union-attr]
            for key in keys
            if before.get(key, _ABSENT) is not container.get(key, _ABSENT)  # type: ignore[union-attr]
        }
    else:
        changed = {
            index: value
            for index, value in enumerate(before)
            if index >= len(container) or container[index] is not value
        }
    if not changed and len(container) == len(before):
        return None
    return _Changed(container, changed, len(before))


def _put_back(change: _Changed) -> None:
    container = change.container
    if isinstance(container, list):
        container[:] = [change.before.get(index, value) for index, value in enumerate(container[: change.length])] + [
            change.before[index] for index in range(len(container), change.length)
        ]
        return
    for key, value in change.before.items():
        if value is _ABSENT:
            container.pop(key, None)
        else:
            container[key] = value


def _fill(container: _Container, contents: _Container) -> None:
    if isinstance(container, list):
        container[:] = contents
    else:
        container.clear()
        container.update(contents)
