"""Follows the operators of a job from step to step: the kind of the next one is looked up, not derived."""

from __future__ import annotations

from typing import Any

import torch

from memprof.policies.remat.cells import Blank, Need, Ref
from memprof.policies.remat.needs import Operator
from memprof.recorder.calls.dispatch_modes import tensors_in

_Tensor = torch.Tensor
_LISTS = (list, tuple)
_strided = torch.strided
#: Types of arguments, tensors aside, whose values decide how much memory an operator needs.
_COUNTED = (int, bool, torch.dtype)
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
#: Most positions kept; a job whose steps always differ drops them at this number and starts over.
MOST_POSITIONS = 100_000


class Kind:
    """A kind of run: an operator on arguments of given layouts, with its memory need.

    Attributes:
        operator: The operator.
        need: Bytes and time of its runs.
        has_recipe: Whether its outputs can be recomputed.
        is_recorded: Whether autograd records the runs.
        is_flat: Whether all its tensors are direct positional arguments.
        tensors: Position and layout of each tensor among the positional arguments.
        reads: The same of those that a second run reads.
        blanks: The others, running statistics, as a recipe stores them.
    """

    __slots__ = (
        "_count",
        "_kwargs",
        "_others",
        "blanks",
        "has_recipe",
        "is_flat",
        "is_recorded",
        "need",
        "operator",
        "reads",
        "tensors",
    )

    def __init__(self, operator: Operator, args: Any, kwargs: Any, need: Need, *, is_recorded: bool) -> None:
        self.operator = operator
        self.need = need
        self.is_recorded = is_recorded
        self._count = len(args)
        self.tensors = tuple((place, Ref(value)) for place, value in enumerate(args) if isinstance(value, _Tensor))
        self._others = tuple(
            (place, type(value), _pattern(value)) for place, value in enumerate(args) if not isinstance(value, _Tensor)
        )
        self._kwargs = {name: (type(value), _pattern(value)) for name, value in kwargs.items()}
        found = tensors_in((args, kwargs))
        self.has_recipe = is_recorded and all(tensor.dtype not in _COMPLEX for tensor in found)
        self.is_flat = len(found) == len(self.tensors)
        statistics = operator.statistics[:2] if operator.statistics and operator.moves_statistics(args) else ()
        self.reads = tuple((place, ref) for place, ref in self.tensors if place not in statistics)
        self.blanks = tuple((place, Blank(args[place])) for place, _ in self.tensors if place in statistics)

    def fits(self, args: Any, kwargs: Any) -> bool:
        """Returns whether arguments are of this kind."""
        if len(args) != self._count or len(kwargs) != len(self._kwargs):
            return False
        for place, ref in self.tensors:
            value = args[place]
            if (
                not isinstance(value, _Tensor)
                or value.layout is not _strided
                or value.is_nested
                or value.dtype is not ref.dtype
                or value.shape != ref.size
                or value.stride() != ref.stride
            ):
                return False
        for place, kind, pattern in self._others:
            value = args[place]
            if type(value) is not kind or (pattern is not None and not _same(pattern, value)):
                return False
        if kwargs:
            for name, (kind, pattern) in self._kwargs.items():
                value = kwargs.get(name, self)
                if type(value) is not kind or (pattern is not None and not _same(pattern, value)):
                    return False
        return True


class Position:
    """One operator of a sequence.

    Attributes:
        kind: Its kind.
        after: The position that followed last.
        others: All that have followed, by kind.
        is_shared: Whether all operators of the kind have this one, because nothing is saved when they run.
    """

    __slots__ = ("after", "is_shared", "kind", "others")

    def __init__(self, kind: Kind | None, *, is_shared: bool) -> None:
        self.kind = kind
        self.is_shared = is_shared
        self.after: Position | None = None
        self.others: dict[Kind, Position] = {}


class Sequence:
    """The operators since autograd saved its first tensor, as a path in a tree of all such sequences so far.

    What runs while nothing is saved evicts nothing: its positions are shared by kind, so evaluation and optimizers of
    any length take no more memory.

    Attributes:
        position: The operator that runs, or ran last.
        is_known: Whether the sequence has occurred before, up to here.
    """

    def __init__(self) -> None:
        self._kinds: dict[Any, Kind] = {}
        self._loose: dict[Kind, Position] = {}
        self._root = Position(None, is_shared=False)
        self._count = 0
        self.is_known = False
        self.position = self._start = Position(None, is_shared=True)

    def begin(self) -> bool:
        """Starts at the root: autograd saved the first tensor. Returns whether all earlier sequences were dropped."""
        is_full = self._count > MOST_POSITIONS
        if is_full:
            self._root, self._count = Position(None, is_shared=False), 0
        self.position, self.is_known = self._root, True
        return is_full

    def end(self) -> None:
        """Leaves the tree: autograd keeps nothing."""
        self.position, self.is_known = self._start, False

    def advance(self, operator: Operator, args: Any, kwargs: Any, is_recorded: bool) -> Position | None:
        """Returns the position of the next operator, None if an argument is not a plain tensor."""
        before = self.position
        position = before.after
        if (
            position is None
            or (kind := position.kind) is None
            or kind.operator is not operator
            or kind.is_recorded is not is_recorded
            or not kind.fits(args, kwargs)
        ):
            if not are_plain(args) or (kwargs and not are_plain(kwargs.values())):
                return None
            position = before.after = self._find(before, operator, args, kwargs, is_recorded)
        self.position = position
        return position

    def kind(self, operator: Operator, args: Any, kwargs: Any, *, is_recorded: bool) -> Kind:
        """Returns the kind of a run."""
        parts: list[Any] = [operator, is_recorded]
        _add_key(parts, args)
        for name, value in kwargs.items():
            parts.append(name)
            _add_key(parts, (value,))
        key = tuple(parts)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = Kind(operator, args, kwargs, Need(), is_recorded=is_recorded)
        return kind

    def _find(self, before: Position, operator: Operator, args: Any, kwargs: Any, is_recorded: bool) -> Position:
        kind = self.kind(operator, args, kwargs, is_recorded=is_recorded)
        if before.is_shared or self._count > MOST_POSITIONS:
            self.is_known = False
            position = self._loose.get(kind)
            if position is None:
                position = self._loose[kind] = Position(kind, is_shared=True)
            return position
        position = before.others.get(kind)
        if position is None:
            position = before.others[kind] = Position(kind, is_shared=False)
            self._count += 1
            self.is_known = False
        return position


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a plain view of bytes; sparse, nested and quantised ones are not."""
    return tensor.layout is _strided and not tensor.is_nested and not tensor.is_quantized


def are_plain(values: Any) -> bool:
    """Returns whether all tensors among arguments are plain."""
    return all(
        is_plain(value) if isinstance(value, _Tensor) else type(value) not in _LISTS or are_plain(value)
        for value in values
    )


def _add_key(parts: list[Any], values: Any) -> None:
    for value in values:
        kind = type(value)
        if isinstance(value, _Tensor):
            parts += (value.shape, value.dtype, value.stride())  # kernels copy operands whose layout they cannot read
        elif kind in _COUNTED:
            parts.append(value)
        elif kind in _LISTS:
            parts.append(len(value))
            _add_key(parts, value)
        else:
            parts.append(kind)


def _pattern(value: Any) -> Any:
    """Returns what a further argument is compared with; None if its type suffices."""
    if isinstance(value, _Tensor):
        return Ref(value)
    if type(value) in _LISTS:
        return [(type(item), _pattern(item)) for item in value]
    return value if type(value) in _COUNTED else None


def _same(pattern: Any, value: Any) -> bool:
    """Returns whether an argument is as its pattern says."""
    if type(pattern) is Ref:
        return pattern.is_layout_of(value)
    if type(pattern) is list:
        return len(pattern) == len(value) and all(
            type(item) is kind and (part is None or _same(part, item))
            for (kind, part), item in zip(pattern, value, strict=True)
        )
    return bool(pattern == value)
