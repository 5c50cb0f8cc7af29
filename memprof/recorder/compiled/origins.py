"""Which modules and lines the buffers of one piece of generated code come from.

Inductor keeps, for every buffer that its code makes, the FX nodes that the buffer is computed by, and TorchDynamo keeps
for every FX node the modules whose forward was running and the Python stack.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
#: Source of a module in a variable of the compiled function, which is itself or inside what the variable holds.
_VARIABLE = re.compile(r"^L\['(\w+)'\]")
_ITEM = re.compile(r"""(?:\._modules)?\[['"]?(\w+)['"]?\]""")


class Place(NamedTuple):
    """A module that was running when a region was compiled; a module of an equal model may run the region as well.

    Attributes:
        address: Its address.
        variable: The variable of the compiled function that held it, or a module around it; "" if unknown.
        path: Its name below what the variable held.
        kind: Name of its type.
    """

    address: int
    variable: str
    path: str
    kind: str


@dataclass(frozen=True)
class Origin:
    """Where a buffer is computed in the job's code.

    Attributes:
        modules: The modules whose forward was running, innermost last.
        frames: The Python stack inside the region as ``file:line:function``, innermost first; empty within torch.
    """

    modules: tuple[Place, ...]
    frames: tuple[str, ...]


@dataclass
class GeneratedFile:
    """One file of generated code.

    Attributes:
        is_backward: It is the backward of a region.
        lines: Its lines.
        origins: Origin of each buffer by name.
        variables: Variables of the compiled function in which modules were found.
        found: Origins by line number and the positions of the arguments that a kernel writes to.
    """

    is_backward: bool
    lines: list[str]
    origins: Mapping[str, Origin]
    variables: frozenset[str]
    found: dict[tuple[int, frozenset[int]], Origin | None] = field(default_factory=dict)

    def at(self, line: int, written: frozenset[int]) -> Origin | None:
        """Returns the origin of what a line makes.

        Args:
            line: Its number, from 1.
            written: Positions of the arguments that a fused kernel writes to; empty for anything else.

        Returns:
            The modules common to all buffers that the line makes, and the stack of the last; None if it is unknown.
        """
        key = line, written
        if key not in self.found:
            names = made_by(self.lines[line - 1], written) if line <= len(self.lines) else []
            self.found[key] = _common([self.origins[name] for name in names if name in self.origins])
        return self.found[key]


def made_by(line: str, written: frozenset[int]) -> list[str]:
    """Returns the names of the buffers that a line of generated code makes or changes.

    Args:
        line: One statement or several.
        written: Positions of the arguments that a fused kernel writes to; empty for anything else.
    """
    try:
        statements = ast.parse(line.strip()).body
    except SyntaxError:
        return []  # part of a longer statement
    statement = statements[0] if statements else None
    if isinstance(statement, ast.Assign):
        return [name for target in statement.targets for name in _names(target)]
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return []
    call = statement.value
    if written:
        return [name for place, value in enumerate(call.args) if place in written for name in _names(value)[:1]]
    outputs = [keyword.value for keyword in call.keywords if keyword.arg == "out"] or call.args[:1]
    return [name for value in outputs for name in _names(value)]


def _names(expression: ast.expr) -> list[str]:
    """Returns the variables in an expression, without the functions it calls."""
    called = {id(node.func) for node in ast.walk(expression) if isinstance(node, ast.Call)}
    return [node.id for node in ast.walk(expression) if isinstance(node, ast.Name) and id(node) not in called]


def origins_of(graph: Any, buffers: Mapping[str, Any]) -> dict[str, Origin]:
    """Returns the origin of each buffer of a lowered graph that has one."""
    order = {node: place for place, node in enumerate(graph.graph.nodes)}
    found = {}
    for name, buffer in buffers.items():
        for node in _candidates(buffer, order):
            origin = _origin(node)
            if origin is not None:
                found[name] = origin
                break
    return found


def _candidates(buffer: Any, order: Mapping[Any, int]) -> Iterator[Any]:
    """Yields the FX nodes that compute a buffer: first the one whose value it holds, then the latest."""
    own = getattr(buffer, "origin_node", None)
    if own is not None:
        yield own
    yield from sorted(getattr(buffer, "origins", ()), key=lambda node: order.get(node, -1), reverse=True)


def _origin(node: Any) -> Origin | None:
    """Returns the origin of an FX node; None where the compiler made it, as a constant."""
    meta = node.meta
    modules = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    trace = _FRAME.findall(meta.get("stack_trace") or "")
    if not modules and not trace:
        return None
    frames = [f"{file}:{line}:{function}" for file, line, function in reversed(trace)]
    return Origin(tuple(_modules(modules)), tuple(frames))


def _modules(stack: Mapping[Any, tuple[str, Any]]) -> Iterator[Place]:
    """Yields the modules of a stack of TorchDynamo's: their source and type by address."""
    for key, (source, kind) in stack.items():
        address = str(key).partition("@")[0]  # followed by @ and a number from the second call on
        variable = _VARIABLE.match(source)
        path = _ITEM.sub(r".\1", source[variable.end() :]).strip(".") if variable else ""
        name = variable[1] if variable else ""
        yield Place(int(address) if address.isdigit() else 0, name, path, getattr(kind, "__name__", ""))


def _common(origins: list[Origin]) -> Origin | None:
    """Returns the modules that all origins share, and the stack of the last; None without origins."""
    if not origins:
        return None
    shared = 0
    for level in zip(*(origin.modules for origin in origins), strict=False):
        if len(set(level)) > 1:
            break
        shared += 1
    return Origin(origins[-1].modules[:shared], origins[-1].frames)
