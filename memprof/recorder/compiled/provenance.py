"""Which modules and source lines the buffers, kernels and operators of generated code come from.

Inductor keeps, for every buffer that its code makes, the FX nodes that the buffer is computed by, and TorchDynamo keeps
for every FX node the modules whose forward was running and the Python stack. Both are read when a graph has been
lowered, and looked up by the line of generated code that is running.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from memprof.recorder.calls.operator_rows import OperatorRows
from memprof.recorder.steps.progress import OpenCall

_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_TORCH = str(Path(torch.__file__).parent)
#: Source of the module whose forward was compiled, also where TorchDynamo calls it through a function of its own.
_SELF = re.compile(r"^L\['(?:self|fn)'\]")
_ITEM = re.compile(r"""(?:\._modules)?\[['"]?(\w+)['"]?\]""")
#: Name in the globals of generated code of where it comes from.
_GENERATED = "__memprof_generated__"
#: Frames of torch between generated code and an operator that it calls.
_MOST_FRAMES = 6
#: Calls of regions whose backward may still run.
_MOST_CALLS = 4096


class Place(NamedTuple):
    """A module that was running when a region was compiled; a module of an equal model may run the region as well.

    Attributes:
        address: Its address.
        path: Its name below the module whose forward was compiled; "" if unknown.
        kind: Name of its type.
    """

    address: int
    path: str
    kind: str


class RegionCall(NamedTuple):
    """One call of a region.

    Attributes:
        module: Number of the innermost module that was running; -1 outside any.
        line: Number of the stack of the line that runs the region.
        outside: Number of the stack that called the function which was compiled.
    """

    module: int
    line: int
    outside: int


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
        found: Origins by line number and the positions of the arguments that a kernel writes to.
    """

    is_backward: bool
    lines: list[str]
    origins: Mapping[str, Origin]
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


def has_origins(module: Any) -> bool:
    """Whether it is known where the code of a generated module comes from."""
    return _GENERATED in vars(module)


class Provenance:
    """Finds the module and the stack of what generated code allocates and runs.

    Attributes:
        graphs: Number of graphs whose code is known.
    """

    def __init__(self) -> None:
        """Knows no generated code yet."""
        self.graphs = 0
        self._calls: dict[int, RegionCall] = {}  # by number of the autograd node
        self._rows: OperatorRows | None = None

    def observe(self) -> None:
        """Reads every graph that inductor lowers from now on, if this torch supports it."""
        from torch._inductor import graph

        lowering: Any = graph.GraphLowering
        original = getattr(lowering, "compile_to_module", None)
        if original is None:
            return

        @wraps(original)
        def compile_to_module(this: Any, *args: Any, **kwargs: Any) -> Any:
            module = original(this, *args, **kwargs)
            self.add(module, this)
            return module

        lowering.compile_to_module = compile_to_module

    def adopt(self, rows: OperatorRows) -> None:
        """Supplies the rows of a recording with modules and stacks."""
        self._rows = rows
        rows.find_place = self._place

    def add(self, module: Any, graph: Any) -> None:
        """Reads where the code of a graph comes from.

        Args:
            module: The generated module.
            graph: The graph that inductor has lowered to it.

        Raises:
            OSError: The module's file cannot be read.
        """
        path, buffers = getattr(module, "__file__", None), getattr(graph, "name_to_buffer", None)
        if path is None or buffers is None:
            return
        self.graphs += 1
        lines = Path(path).read_text("utf-8").splitlines()
        file = GeneratedFile(bool(getattr(graph, "is_backward", False)), lines, _origins(graph, buffers))
        vars(module)[_GENERATED] = file

    def _place(
        self,
        frame: FrameType | None,
        written: frozenset[int],
        open_call: OpenCall | None,
        made: int,
        running: int,
    ) -> tuple[int, int] | None:
        """Returns the module and the stack of an operator; None if no generated code has called it."""
        for _ in range(_MOST_FRAMES):
            if frame is None or _GENERATED in frame.f_globals:
                break
            frame = frame.f_back
        file: GeneratedFile | None = None if frame is None else frame.f_globals.get(_GENERATED)
        rows = self._rows
        if rows is None or frame is None or file is None:
            return None
        call = self._calls.get(running) if file.is_backward else self._called(rows, frame, open_call, made)
        if call is None:
            return None  # its forward was not recorded
        origin = file.at(frame.f_lineno, written)
        if origin is None:
            return call.module, call.line
        numbers = (
            rows.registry.below(call.module, place.path, place.kind, place.address)
            for place in reversed(origin.modules)
        )
        module = next((number for number in numbers if number >= 0), call.module)
        return module, rows.stacks.inside(origin.frames, call.outside) if origin.frames else call.line

    def _called(self, rows: OperatorRows, frame: FrameType, open_call: OpenCall | None, node: int) -> RegionCall:
        """Returns the call of the region that is running in forward."""
        while frame.f_back is not None and (
            _GENERATED in frame.f_globals or frame.f_code.co_filename.startswith(_TORCH)
        ):
            frame = frame.f_back
        module, stack = (-1, -1) if open_call is None else (open_call.module, open_call.stack)
        call = RegionCall(module, rows.stacks.number(frame, stack), rows.stacks.outside(frame, stack))
        self._calls[node] = call
        if len(self._calls) > _MOST_CALLS:
            del self._calls[next(iter(self._calls))]
        return call


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


def _origins(graph: Any, buffers: Mapping[str, Any]) -> dict[str, Origin]:
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
        path = _ITEM.sub(r".\1", _SELF.sub("", source)).strip(".") if _SELF.match(source) else ""
        yield Place(int(address) if address.isdigit() else 0, path, getattr(kind, "__name__", ""))


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
