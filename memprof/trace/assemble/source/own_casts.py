"""Finds operators whose source code may cast to another type, which leaves no trace in a step that is in float32."""

from __future__ import annotations

import re
from functools import cache

import numpy as np

from memprof.trace.schema import NONE, Ops, Stacks
from memprof.trace.source_lines import PLACE, function_around, is_of_torch, lines_of

#: In source code: ``x.float()``, ``softmax(x, dtype=torch.float32)``, ``x.to(other.dtype)``, ``x.type_as(other)``.
_CASTS = re.compile(r"dtype|float32|\.float\(|\.double\(|\.type(_as)?\(|\.(half|bfloat16)\(")
#: In a function that calls another with the tensor.
_CASTS_BEFORE = re.compile(r"float32|\.float\(|\.double\(")
#: Functions around the innermost one outside torch that are read as well.
_CALLERS = 2


def find_own_casts(ops: Ops, stacks: Stacks) -> tuple[int, ...]:
    """Returns the stacks whose code may cast, by their ids.

    That is where the function that calls torch names a type, or one of the two functions around it casts to float32.
    Code that cannot be read, such as a notebook's, may cast.

    Args:
        ops: The recorded operators.
        stacks: Their stacks.
    """
    used = np.unique(ops.stack_id[ops.stack_id != NONE]).tolist()
    ids = stacks.stack_id.tolist()
    texts = dict(zip(ids, stacks.frames.tolist(), strict=True))
    try:
        return tuple(one for one in used if _may_cast(str(texts[one])))
    finally:
        _names_type.cache_clear()


def _may_cast(frames: str) -> bool:
    own = [frame for frame in frames.splitlines() if not is_of_torch(frame)][: _CALLERS + 1]
    places = [place for frame in own if (place := PLACE.match(frame))]
    if len(places) < len(own) or not places:
        return True
    patterns = [_CASTS, *[_CASTS_BEFORE] * _CALLERS]
    return any(
        _names_type(place["path"], int(place["line"]), pattern)
        for place, pattern in zip(places, patterns, strict=False)
    )


@cache
def _names_type(path: str, line: int, pattern: re.Pattern[str]) -> bool:
    """Returns whether the function around a line has the pattern, or cannot be read."""
    first, last = function_around(path, line)
    return first == last or any(pattern.search(text) for text in lines_of(path)[first:last])
