"""What holds memory: variables of the job, autograd's graph, objects that only refer to each other."""

from __future__ import annotations

import ast
import dis
import gc
import heapq
import sys
import types
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch

#: Code that calls one of these may hold the dictionary of its locals, which reading them would change.
_READS_LOCALS = {"locals", "vars", "eval", "exec", "dir"}
#: A frame's dictionary of locals is referred to by the frame, the variable here, and the argument of getrefcount.
_UNSHARED = 3
_LARGEST_SOURCE = 4 << 20
_Line = TypeVar("_Line")
#: Nodes of one graph that are followed.
_MOST_NODES = 5_000
#: The same of all graphs that are searched together.
_MOST_NODES_OF_ALL = 15_000
#: Nodes that accumulate gradients all have the largest number.
_ACCUMULATE = 2**63
#: Objects after whose type a cycle is not named if others are in it.
_UNNAMED = (torch.Tensor, dict, list, tuple, set, deque, types.CellType, types.MethodType, types.FunctionType)

#: The names of the module of the job's script, and its file, which Python removes from it when the script has ended.
_MAIN = ("__main__", "__mp_main__")
_MAIN_FILE = getattr(sys.modules.get("__main__"), "__file__", None)


@dataclass(frozen=True)
class Variable:
    """A variable.

    Attributes:
        kind: ``global``, ``local`` or ``class``.
        name: Its name.
        file: File of its module or function, "" where unknown.
        line: Line of its first assignment, 0 where unknown.
        function: The function, ``<module>`` for a global.
    """

    kind: str
    name: str
    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """File, line and function as in a stack, "" where the file is unknown."""
        return f"{self.file}:{self.line}:{self.function}" if self.file else ""


def running_frames() -> list[types.FrameType]:
    """Lists the frames of functions that run now in any thread, without memprof's and torch's own."""
    frames = []
    for frame in sys._current_frames().values():
        one: types.FrameType | None = frame
        while one is not None:
            owner = str(one.f_globals.get("__name__", "")).partition(".")[0]
            if owner not in ("memprof", "torch") and one.f_code.co_flags & 0x1:  # CO_OPTIMIZED: a function
                frames.append(one)
            one = one.f_back
    del frame  # this function's own: all that its callers refer to would live until a collection
    return frames


def read_locals(frame: types.FrameType) -> dict[str, int]:
    """Returns the names of a function's local variables, and the ids of their values."""
    return {name: id(value) for name, value in local_values(frame).items()}


def local_values(frame: types.FrameType) -> dict[str, Any]:
    """Returns a function's local variables.

    Before Python 3.13, reading them fills a dictionary that belongs to the frame, and would keep old values alive: it
    is emptied again. Where that could be noticed (under a debugger, or if the function reads it itself), nothing is
    read.
    """
    if sys.version_info >= (3, 13):
        return dict(frame.f_locals)
    if sys.gettrace() is not None or frame.f_trace is not None or _READS_LOCALS & set(frame.f_code.co_names):
        return {}
    values = frame.f_locals
    found = dict(values)
    if sys.getrefcount(values) <= _UNSHARED:
        values.clear()
    return found


def local_variable(frame: types.FrameType, name: str) -> Variable:
    """Returns a local variable of a frame."""
    code = frame.f_code
    return Variable("local", name, code.co_filename, _stored_at(code, name), code.co_name)


def global_variable(module: str, name: str) -> Variable:
    """Returns a global variable of a module."""
    file = getattr(sys.modules.get(module), "__file__", _MAIN_FILE if module in _MAIN else None)
    path = str(Path(file).absolute()) if isinstance(file, str) else ""
    return Variable("global", name, path, _assigned_at(path, name), "<module>")


def _stored_at(code: types.CodeType, name: str) -> int:
    line = 0
    for instruction in dis.get_instructions(code):
        line = (instruction.positions.lineno if instruction.positions else None) or line
        if instruction.opname.startswith("STORE_") and instruction.argval == name:
            return line
    return code.co_firstlineno


@lru_cache(maxsize=256)
def _assigned_at(path: str, name: str) -> int:
    try:
        if not path.endswith(".py") or Path(path).stat().st_size > _LARGEST_SOURCE:
            return 0
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return node.lineno
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node.lineno
    return 0


def graph_holders(lines: Mapping[_Line, frozenset[int]], computed: list[torch.Tensor]) -> dict[_Line, torch.Tensor]:
    """Returns, for lines whose tensors only a graph holds, a tensor that this graph belongs to.

    Args:
        lines: The sequence numbers of the autograd nodes of each line's operators.
        computed: Tensors with a graph. Of several graphs that hold a line's tensors, the smallest counts: that of a
            state that carries its history, not that of a loss computed from it.
    """
    owner = {number: line for line, numbers in lines.items() for number in numbers}
    graphs: list[tuple[list[int], torch.Tensor]] = []
    left = _MOST_NODES_OF_ALL
    for tensor in computed if owner else ():
        numbers = list(_nodes(tensor, min(owner)))
        graphs.append((numbers, tensor))
        left -= len(numbers)
        if left <= 0:
            break
    found: dict[_Line, torch.Tensor] = {}
    for numbers, tensor in sorted(graphs, key=lambda one: len(one[0])):
        for number in numbers:
            if number in owner:
                found.setdefault(owner[number], tensor)
    return found


def graphs_over_steps(
    computed: list[torch.Tensor], first: int, step_began_at: int
) -> list[tuple[list[int], torch.Tensor]]:
    """Returns the graphs that reach back beyond the last step, each with its tensor, the smallest graph first.

    A hidden state that carries its history into the next step's loss has a smaller graph than this loss.

    Returns:
        The sequence numbers of the nodes, and the tensor.
    """
    found = []
    for tensor in computed:
        numbers = [number for number in _nodes(tensor, first) if first <= number < _ACCUMULATE]
        if numbers and min(numbers) < step_began_at:
            found.append((sorted(numbers), tensor))
    return sorted(found, key=lambda one: len(one[0]))


def _nodes(tensor: torch.Tensor, lowest: int) -> Iterator[int]:
    """Yields the sequence numbers of the nodes of a tensor's graph, none below the lowest.

    A node has a higher number than those that it leads to. The lowest that is known is followed first: of a loss summed
    over steps, that is the sum of the step before.
    """
    try:
        root = tensor.grad_fn
    except RuntimeError:  # one of several views whose base was written to, such as FSDP's of a flat parameter
        return
    if root is None:
        return
    seen = {root._sequence_nr()}
    waiting = [(root._sequence_nr(), root)]
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        number, node = heapq.heappop(waiting)
        yield number
        for following, _ in node.next_functions:
            if following is None:
                continue
            number = following._sequence_nr()
            if number >= lowest and number not in seen:  # so that no two in the heap have the same
                seen.add(number)
                heapq.heappush(waiting, (number, following))


def cycle_above(tensor: torch.Tensor, above: Mapping[int, Any], counted: Mapping[int, int]) -> Any:
    """Returns the object of a reference cycle that is nearest to a tensor it alone keeps alive, else None.

    As the collector does, it compares the number of references to each object with those that the others have to it.

    Args:
        tensor: The tensor.
        above: All objects that lead to the tensor, by identity.
        counted: References that the caller has to each of them, in addition to `above`.
    """
    objects = {**above, id(tensor): tensor}
    below = {number: [id(one) for one in gc.get_referents(each)] for number, each in objects.items()}
    references = Counter(child for children in below.values() for child in children if child in objects)
    inside = {number: objects.keys() & set(children) for number, children in below.items()}
    parents: dict[int, set[int]] = {number: set() for number in objects}
    for number, children in inside.items():
        for child in children:
            parents[child].add(number)
    # Of tensors, only references that the collector sees count: torch and the caller have others.
    if not all(parents.values()) or any(
        # Those of `above`, of `objects`, and of the call.
        sys.getrefcount(above[number]) > references[number] + counted.get(number, 0) + 3
        for number in above
        if not issubclass(type(above[number]), torch.Tensor)
    ):
        return None
    rest = dict(parents)
    while ends := [number for number in rest if not rest.keys() & inside[number]]:
        for number in ends:
            del rest[number]
    nearest = [id(tensor)]
    for number in nearest:  # grows while it is read: the nearest first
        nearest += [one for one in parents[number] if one not in nearest]
    cycle = [objects[number] for number in nearest if number in rest]
    named = (one for one in cycle if not issubclass(type(one), _UNNAMED))
    return next(named, cycle[0] if cycle else None)
