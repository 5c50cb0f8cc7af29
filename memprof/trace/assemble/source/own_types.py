"""Finds operators that the job's source runs in float32, or in the type of a weight, whatever the type of the model.

In a step recorded in float32 such a cast does nothing, so no operator shows it. The source does:
``x = x.to(torch.float32)``, ``softmax(x, dtype=torch.float32)``, ``self.normalize(x.float())``,
``x.to(layer.weight.dtype)``; and whether the function casts back what it has computed: ``.to(query.dtype)``,
``.type_as(x)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.assemble.source.function_types import (
    ARGUMENT,
    CHOSEN,
    FLOAT32,
    OTHER,
    WEIGHT,
    Given,
    read_types,
)
from memprof.trace.schema import NONE, Ops, Stacks
from memprof.trace.source_lines import PLACE, function_around, is_of_torch

#: Of a stack: that of some other tensor.
_LIKE = "like"
#: In stacks: where torch calls a module, and a module of torch that calls others.
_MODULE_CALL, _CONTAINER = "_wrapped_call_impl", "container.py"


@dataclass(frozen=True)
class OwnTypes:
    """Stacks, by their ids, whose operators run in a type that the job's code chooses.

    Attributes:
        float32: They run in float32.
        weight: They run in the type of a weight.
        casts_back: Of both, those whose results the code casts back.
        made_like: They make a tensor in the type of another, which no floating point tensor is read for:
            ``torch.zeros(n, dtype=x.dtype)``, ``is_token.to(x.dtype)``.
        in_argument: They read what the function has cast to the type of one of its arguments: ``x.type(value.dtype)``.
    """

    float32: tuple[int, ...]
    weight: tuple[int, ...]
    casts_back: tuple[int, ...]
    made_like: tuple[int, ...]
    in_argument: tuple[int, ...]


@dataclass(frozen=True)
class _Found:
    """What the source says of a stack's operators.

    Attributes:
        kind: The type in which they run.
        casts_back: Whether their results are cast back.
        casts_like: Whether the statement casts to the type of a variable.
    """

    kind: str = OTHER
    casts_back: bool = False
    casts_like: bool = False


def find_own_types(ops: Ops, stacks: Stacks, *, on_device: bool) -> OwnTypes:
    """Returns which stacks run in a type that the job's code chooses.

    Args:
        ops: The recorded operators.
        stacks: Their stacks.
        on_device: Whether they ran on a GPU, where code that looks whether autocast is on finds that it is.
    """
    used = set(np.unique(ops.stack_id[ops.stack_id != NONE]).tolist())
    found = {
        number: _type_of(str(frames), on_device)
        for number, frames in zip(stacks.stack_id.tolist(), stacks.frames.tolist(), strict=True)
        if number in used
    }
    return OwnTypes(
        tuple(sorted(number for number, one in found.items() if one.kind == FLOAT32)),
        tuple(sorted(number for number, one in found.items() if one.kind == WEIGHT)),
        tuple(sorted(number for number, one in found.items() if one.casts_back and one.kind in CHOSEN)),
        tuple(sorted(number for number, one in found.items() if one.kind == _LIKE or one.casts_like)),
        tuple(sorted(number for number, one in found.items() if one.kind == ARGUMENT)),
    )


def forget_types() -> None:
    """Drops what was read of functions."""
    read_types.cache_clear()


def _type_of(frames: str, on_device: bool) -> _Found:
    """Returns what the source says of a stack's operators."""
    lines = frames.splitlines()
    depth = next((number for number, frame in enumerate(lines) if not is_of_torch(frame)), len(lines))
    own = [place for frame in lines[depth:] if not is_of_torch(frame) and (place := PLACE.match(frame))]
    if not own:
        return _Found()
    path, line, name = own[0]["path"], int(own[0]["line"]), own[0]["function"]
    given: Given = frozenset()
    casts_back = False
    if len(own) > 1:
        caller = read_types(
            own[1]["path"], *function_around(own[1]["path"], int(own[1]["line"])), frozenset(), on_device
        )
        given = caller.given.get((int(own[1]["line"]), name), frozenset())
        casts_back = bool(given) and caller.casts_back
    read = read_types(path, *function_around(path, line), given, on_device)
    kind = _LIKE if line in read.makes_like else read.lines.get(line, OTHER)
    called = PLACE.match(lines[depth - 1]) if depth else None
    if called is not None:
        kind = read.calls.get((line, called["function"]), kind)
        if called["function"] == _MODULE_CALL and not any(_CONTAINER in frame for frame in lines[:depth]):
            kind = read.modules.get(line, kind)
    return _Found(kind, casts_back=casts_back or read.casts_back, casts_like=line in read.casts_like)
