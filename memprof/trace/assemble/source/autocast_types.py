"""Finds operators that make a tensor in the type of autocast, which the job's code asks torch for.

In a step recorded in float32 autocast is off, and such a tensor is in float32. The source shows what it becomes:
``dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype``, and then
``torch.empty(n, dtype=dtype)``.
"""

from __future__ import annotations

import ast
import re
from functools import cache

import numpy as np

from memprof.trace.assemble.source.statements import own_nodes, parse_function
from memprof.trace.schema import NONE, Ops, Stacks
from memprof.trace.source_lines import PLACE, function_around, is_of_torch, lines_of

#: What torch returns autocast's type with, unless it is that of the other kind of device by its name.
_ON_CPU = re.compile(r"get_autocast_(?:cpu_dtype\(|dtype\((?!['\"]cuda))")
_ON_DEVICE = re.compile(r"get_autocast_(?:gpu_dtype\(|dtype\((?!['\"]cpu))")
#: Asked without a device, this is whether a GPU's autocast is on.
_UNNAMED = "is_autocast_enabled()"


def find_autocast_types(ops: Ops, stacks: Stacks, *, on_device: bool) -> tuple[int, ...]:
    """Returns the stacks whose operators make a tensor in autocast's type, by their ids.

    Args:
        ops: The recorded operators.
        stacks: Their stacks.
        on_device: Whether they ran on a GPU, whose autocast code asks for without naming a device.
    """
    used = set(np.unique(ops.stack_id[ops.stack_id != NONE]).tolist())
    try:
        return tuple(
            number
            for number, frames in zip(stacks.stack_id.tolist(), stacks.frames.tolist(), strict=True)
            if number in used and _makes_short(str(frames), on_device)
        )
    finally:
        _lines_that_make.cache_clear()


def _makes_short(frames: str, on_device: bool) -> bool:
    innermost = next((frame for frame in frames.splitlines() if not is_of_torch(frame)), "")
    place = PLACE.match(innermost)
    if place is None:
        return False
    line = int(place["line"])
    return line in _lines_that_make(place["path"], *function_around(place["path"], line), on_device)


@cache
def _lines_that_make(path: str, first: int, last: int, on_device: bool) -> frozenset[int]:
    """Returns the lines of a function's calls that are given autocast's type as ``dtype``."""
    has_type = any("dtype=" in text for text in lines_of(path)[first:last])
    definition = parse_function(path, first, last) if has_type else None
    if definition is None:
        return frozenset()
    nodes = own_nodes(definition.body)
    names = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and _is_autocast_type(node.value, path, on_device)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    made: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Call):
            given = [word.value for word in node.keywords if word.arg == "dtype"]
            if any(_is_one_of(one, names) or _is_autocast_type(one, path, on_device) for one in given):
                made.update(range(first + node.lineno, first + (node.end_lineno or node.lineno) + 1))
    return frozenset(made)


def _is_one_of(value: ast.expr, names: set[str]) -> bool:
    return isinstance(value, ast.Name) and value.id in names


def _is_autocast_type(value: ast.expr, path: str, on_device: bool) -> bool:
    """Returns whether an expression is autocast's type, as a call of torch or of a function of the file returns it."""
    called = [node.func for node in ast.walk(value) if isinstance(node, ast.Call)]
    return _asks(ast.unparse(value), on_device) or any(
        _asks(_source_of(path, one.id), on_device) for one in called if isinstance(one, ast.Name)
    )


def _asks(text: str, on_device: bool) -> bool:
    pattern = _ON_DEVICE if on_device else _ON_CPU
    return pattern.search(text) is not None and (on_device or _UNNAMED not in text)


def _source_of(path: str, name: str) -> str:
    """Returns the source of a function that the file defines, "" where it defines none of that name."""
    lines = lines_of(path)
    start = next((number for number, text in enumerate(lines) if text.startswith(f"def {name}(")), None)
    return "" if start is None else "\n".join(lines[slice(*function_around(path, start + 2))])


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
