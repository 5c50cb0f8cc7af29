"""Characteristics of a step besides its bytes, which distinguish the causes of a change between two steps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from memprof.analysis.report.sources import Sources
from memprof.trace.schema import NONE, Ints
from memprof.trace.step import Step

#: Name for recomputed operators among the phases of ``Traits.operators``.
AGAIN = "again"

#: Name for the entries that are not listed one by one.
REST = "(others)"

#: Entries of each mapping that are listed one by one, the largest first.
_MOST_OPERATORS, _MOST_TYPES, _MOST_PARAMETERS, _MOST_SHAPES, _MOST_LINES = 32, 32, 24, 4, 6

#: What persists across steps by design.
_OWNED = ("parameter", "buffer", "gradient", "optimizer_state")
_STAYS = (*_OWNED, "input")

#: Layer numbers in parameter names.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Traits:
    """Characteristics of a step.

    Attributes:
        modules: Number of modules by type.
        parameters: Number of parameters by shape: ``2 x 512x128`` by name, with layer numbers as ``*``.
        operators: Number of calls of each operator, by phase; recomputed ones under AGAIN.
        saved_bytes: Bytes of the activations saved for backward.
        graph_bytes: Those that are still live when the step ends.
        unread_bytes: Bytes left by calls of whole models that no backward follows.
        held: Number and bytes of the forward tensors that outlive the step, by line of code.
        outside: Number and bytes of the tensors live over the whole step that are not a parameter, gradient, buffer or
            optimizer state, by shape.
        growth_bytes: Allocated bytes at the end of the step less those at its start.
    """

    modules: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    operators: dict[str, dict[str, int]] = field(default_factory=dict)
    saved_bytes: int = 0
    graph_bytes: int = 0
    unread_bytes: int = 0
    held: dict[str, tuple[int, int]] = field(default_factory=dict)
    outside: dict[str, tuple[int, int]] = field(default_factory=dict)
    growth_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Returns the object as JSON containers."""
        return asdict(self)

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Traits:
        """Reads the output of ``to_json``.

        Raises:
            KeyError: A key is missing.
            TypeError: A value has the wrong type.
            ValueError: A pair is invalid.
        """
        return Traits(
            modules=_typed(record["modules"], int),
            parameters=_typed(record["parameters"], str),
            operators={phase: _typed(names, int) for phase, names in _typed(record["operators"], dict).items()},
            **_typed({key: record[key] for key in ("saved_bytes", "graph_bytes", "unread_bytes", "growth_bytes")}, int),
            held={line: _pair(value) for line, value in _typed(record["held"], list).items()},
            outside={shape: _pair(value) for shape, value in _typed(record["outside"], list).items()},
        )


def traits_of(step: Step, sources: Sources) -> Traits:
    """Returns the characteristics of a step."""
    storages = step.storages
    saved = np.unique(step.saved.storage_id[step.saved.released_op_id != NONE])
    saved = saved[(storages.created_op_id[saved] != NONE) & ~np.isin(storages.category[saved], _STAYS)]
    left = saved[storages.freed_op_id[saved] == NONE]
    at_end = int(storages.allocated_bytes[storages.freed_op_id == NONE].sum())
    return Traits(
        modules=_most(Counter(step.modules.type.tolist()), _MOST_TYPES),
        parameters=_parameters(step),
        operators=_operators(step),
        saved_bytes=int(storages.allocated_bytes[saved].sum()),
        graph_bytes=int(storages.allocated_bytes[left].sum()),
        unread_bytes=_unread(step),
        held=_held(step, sources),
        outside=_outside(step),
        growth_bytes=at_end - step.bytes_at_start(),
    )


def rounds_of(step: Step) -> int:
    """Returns the micro-batches of a step: rounds of forward and backward, each with a call of a whole model.

    A loss differentiated in chunks runs backward several times after one call; that is one micro-batch.
    """
    rounds = int(step.ops.micro_batch.max(initial=0)) + 1
    calls = step.module_calls
    is_root = np.isin(calls.module_id, np.flatnonzero(step.modules.parent_id == NONE)) & ~calls.is_recompute
    of_root = Counter(calls.module_id[is_root].tolist())
    return min(rounds, max(of_root.values())) if of_root else rounds


def _parameters(step: Step) -> dict[str, str]:
    storages = step.storages
    rows = np.flatnonzero((storages.category == "parameter") & (storages.created_op_id == NONE))
    sizes: Counter[str] = Counter()
    shapes: dict[str, Counter[str]] = {}
    for name, shape, size in zip(
        storages.name[rows].tolist(),
        storages.shape[rows].tolist(),
        storages.allocated_bytes[rows].tolist(),
        strict=True,
    ):
        if name:
            folded = _NUMBER.sub("*", name)
            sizes[folded] += size
            shapes.setdefault(folded, Counter())[shape or "unknown shape"] += 1
    return {name: _listed(shapes[name]) for name in _most(sizes, _MOST_PARAMETERS) if name != REST}


def _listed(shapes: Counter[str]) -> str:
    """Lists the most frequent shapes with their counts, and how many others there are."""
    ordered = sorted(shapes.items(), key=lambda item: (-item[1], item[0]))
    parts = [f"{count} x {shape}" if count > 1 else shape for shape, count in ordered[:_MOST_SHAPES]]
    rest = sum(count for _, count in ordered[_MOST_SHAPES:])
    return ", ".join(parts) + (f" and {rest} more" if rest else "")


def _operators(step: Step) -> dict[str, dict[str, int]]:
    ops = step.ops
    by_phase: dict[str, Counter[str]] = {}
    for (phase, again, name), count in Counter(
        zip(ops.phase.tolist(), ops.is_recompute.tolist(), ops.name.tolist(), strict=True)
    ).items():
        by_phase.setdefault(AGAIN if again else phase, Counter())[name] += count
    return {phase: _most(names, _MOST_OPERATORS) for phase, names in by_phase.items()}


def _unread(step: Step) -> int:
    """Sums the bytes left by calls of whole models with gradients enabled that no backward follows."""
    ops, calls, storages = step.ops, step.module_calls, step.storages
    answered = np.zeros(len(ops) + 1, dtype=np.int64)
    forward = ops.forward_op_id[(ops.forward_op_id != NONE) & (ops.phase == "backward")]
    answered[forward + 1] = 1
    answered = np.cumsum(answered)
    is_forward = np.append(ops.phase == "forward", False)  # without gradients, no operator is forward
    outermost = (calls.parent_call_id == NONE) & ~calls.is_recompute & (calls.first_op_id != NONE)
    is_root = np.append(step.modules.parent_id == NONE, False)[calls.module_id]
    unread = 0
    for row in np.flatnonzero(outermost & is_root & is_forward[calls.first_op_id]).tolist():
        first, last = int(calls.first_op_id[row]), int(calls.last_op_id[row])
        if answered[last + 1] > answered[first]:
            continue
        lives_on = (storages.freed_op_id == NONE) | (storages.freed_op_id > last)
        is_made = (storages.created_op_id >= first) & (storages.created_op_id <= last)
        unread += int(storages.allocated_bytes[is_made & lives_on].sum())
    return unread


def _held(step: Step, sources: Sources) -> dict[str, tuple[int, int]]:
    storages, ops = step.storages, step.ops
    rows = np.flatnonzero(
        (storages.created_op_id != NONE)
        & (storages.freed_op_id == NONE)
        & (storages.allocated_bytes > 0)
        & ~np.isin(storages.category, _STAYS)
    )
    rows = rows[ops.phase[storages.created_op_id[rows]] == "forward"]
    lines = [sources.of_stack(stack) for stack in ops.stack_id[storages.created_op_id[rows]].tolist()]
    return _counted(["" if line is None else line.place for line in lines], storages.allocated_bytes[rows])


def _outside(step: Step) -> dict[str, tuple[int, int]]:
    storages = step.storages
    rows = np.flatnonzero(
        (storages.created_op_id == NONE)
        & (storages.freed_op_id == NONE)
        & (storages.allocated_bytes > 0)
        & ~np.isin(storages.category, _OWNED)
    )
    return _counted(storages.shape[rows].tolist(), storages.allocated_bytes[rows])


def _counted(keys: Sequence[str], sizes: Ints) -> dict[str, tuple[int, int]]:
    counts: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    for key, size in zip(keys, sizes.tolist(), strict=True):
        counts[key] += 1
        sums[key] += size
    kept = _most(sums, _MOST_LINES)
    counts[REST] = sum(count for key, count in counts.items() if key not in kept)
    return {key: (counts[key], size) for key, size in kept.items()}


def _most(counts: Mapping[str, int], most: int) -> dict[str, int]:
    """Returns the largest entries, and the sum of the others under its own name."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rest = sum(count for _, count in ordered[most:])
    return dict(ordered[:most]) | ({REST: rest} if rest else {})


def _typed(values: Any, kind: type) -> dict[str, Any]:
    """Returns a JSON object whose values all have one type."""
    if type(values) is not dict:
        raise TypeError(f"{values!r}: not an object")
    for value in values.values():
        if type(value) is not kind:
            raise TypeError(f"{value!r}: not of type {kind.__name__}")
    return values


def _pair(value: list[Any]) -> tuple[int, int]:
    count, size = value
    if type(count) is not int or type(size) is not int:
        raise TypeError(f"{value!r}: not whole numbers")
    return count, size
