"""Which modules and source lines the buffers, kernels and operators of generated code come from.

What inductor and TorchDynamo keep with a graph is read when the graph has been lowered, and looked up by the line of
generated code that is running.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import wraps
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from memprof.recorder.calls.module_registry import ModuleRegistry
from memprof.recorder.calls.operator_rows import OperatorRows
from memprof.recorder.compiled.origins import GeneratedFile, Place, origins_of
from memprof.recorder.steps.progress import OpenCall

#: Variables that hold the module whose forward was compiled, also where TorchDynamo calls it by a function of its own.
_OWN = ("self", "fn")
#: Name in the globals of generated code of where it comes from.
_GENERATED = "__memprof_generated_file__"
#: Frames of torch between generated code and an operator that it calls.
_MOST_FRAMES = 6
#: Calls of regions whose backward may still run.
_MOST_CALLS = 4096
#: How the names begin that TorchDynamo gives to compiled graphs in the functions that call them.
_COMPILED = "__compiled_fn"
#: Names of functions that give the job the dictionary of its variables, which reading them would change.
_READERS = frozenset({"dir", "eval", "exec", "locals", "vars"})
#: Before Python 3.13, reading a frame's variables leaves references to them in a dictionary until the frame ends.
_LEAVES_COPIES = sys.version_info < (3, 13)
_MOST_CALLERS = 40


class RegionCall(NamedTuple):
    """One call of a region.

    Attributes:
        module: Number of the innermost module that was running; -1 outside any.
        stack: Number of the stack that runs the region.
        held: Numbers of the modules that variables of the compiled function held, by name.
    """

    module: int
    stack: int
    held: Mapping[str, int]


def has_origins(module: Any) -> bool:
    """Whether it is known where the code of a generated module comes from."""
    return _GENERATED in vars(module)


class Provenance:
    """Finds the module and the stack of what generated code allocates and runs.

    Attributes:
        graphs: Number of graphs whose code is known.
    """

    def __init__(self) -> None:
        self.graphs = 0
        self._calls: dict[int, RegionCall] = {}  # by number of the autograd node
        self._rows: OperatorRows | None = None
        self._locals = LocalModules()

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
        self._look_up()

    def _look_up(self) -> None:
        """Has operators looked up, which costs each some time, once there is a graph."""
        if self._rows is not None and self.graphs:
            self._rows.find_place = self._place

    def add(self, module: Any, graph: Any) -> None:
        """Reads where the code of a graph comes from.

        Raises:
            OSError: The module's file cannot be read.
        """
        path, buffers = getattr(module, "__file__", None), getattr(graph, "name_to_buffer", None)
        if path is None or buffers is None:
            return
        self.graphs += 1
        lines = Path(path).read_text("utf-8").splitlines()
        origins = origins_of(graph, buffers)
        variables = frozenset(place.variable for origin in origins.values() for place in origin.modules) - {""}
        is_backward = bool(getattr(graph, "is_backward", False))
        vars(module)[_GENERATED] = GeneratedFile(is_backward, lines, origins, variables)
        self._look_up()

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
        call = self._calls.get(running) if file.is_backward else self._called(rows, file, frame, open_call, made)
        if call is None:
            return None  # its forward was not recorded
        origin = file.at(frame.f_lineno, written)
        if origin is None:
            return call.module, call.stack
        numbers = (_number(rows.registry, call, place) for place in reversed(origin.modules))
        module = next((number for number in numbers if number >= 0), call.module)
        return module, rows.stacks.inside(origin.frames, call.stack) if origin.frames else call.stack

    def _called(
        self, rows: OperatorRows, file: GeneratedFile, frame: FrameType, open_call: OpenCall | None, node: int
    ) -> RegionCall:
        """Returns the call of the region that is running in forward."""
        while frame.f_back is not None and _GENERATED in frame.f_globals:
            frame = frame.f_back
        module, stack = (-1, -1) if open_call is None else (open_call.module, open_call.stack)
        held = self._locals.find(frame, file.variables) if file.variables else {}
        numbers = {name: number for name, value in held.items() if (number := rows.registry.find(value)) >= 0}
        call = RegionCall(module, rows.stacks.number(frame, stack), numbers)
        self._calls[node] = call
        if len(self._calls) > _MOST_CALLS:
            del self._calls[next(iter(self._calls))]
        return call


def _number(registry: ModuleRegistry, call: RegionCall, place: Place) -> int:
    """Returns the number of the module that a place is in this call of its region; -1 if none is known."""
    held = call.held.get(place.variable, -1)
    if held >= 0:
        return registry.below(held, place.path, place.kind, place.address) if place.path else held
    return registry.below(call.module, place.path if place.variable in _OWN else "", place.kind, place.address)


class LocalModules:
    """Finds the function that runs compiled code, and its modules: one graph may run for several of them."""

    def __init__(self) -> None:
        self._known: dict[CodeType, bool] = {}

    def find(self, frame: FrameType, variables: Iterable[str]) -> dict[str, torch.nn.Module]:
        """Returns the modules that some variables of the compiled function hold.

        Args:
            frame: A frame called by it, such as that of generated code.
            variables: Names of its variables.
        """
        here: FrameType | None = frame
        for _ in range(_MOST_CALLERS):
            if here is None or self._is_compiled(here.f_code):
                break
            here = here.f_back
        if here is None or not self._is_compiled(here.f_code) or not _can_read(here.f_code):
            return {}
        values = here.f_locals
        found = {name: values[name] for name in variables if isinstance(values.get(name), torch.nn.Module)}
        if _LEAVES_COPIES:
            values.clear()
        return found

    def _is_compiled(self, code: CodeType) -> bool:
        found = self._known.get(code)
        if found is None:
            found = self._known[code] = any(name.startswith(_COMPILED) for name in code.co_names)
        return found


def _can_read(code: CodeType) -> bool:
    """Whether reading a function's variables changes nothing that the job can see."""
    if not code.co_flags & CO_OPTIMIZED:
        return False  # a module or a class, whose variables are the dictionary itself
    return not _LEAVES_COPIES or (sys.gettrace() is None and _READERS.isdisjoint(code.co_names))
