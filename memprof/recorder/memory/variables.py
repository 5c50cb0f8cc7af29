"""Variables of the job: names and lines of globals and locals, read without keeping any value alive."""

from __future__ import annotations

import ast
import dis
import sys
import types
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

#: Code that calls one of these may hold the dictionary of its locals, which reading them would change.
_READS_LOCALS = {"locals", "vars", "eval", "exec", "dir"}
#: A frame's dictionary of locals is referred to by the frame, the variable here, and the argument of getrefcount.
_UNSHARED = 3
_LARGEST_SOURCE = 4 << 20


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
    return frames


def read_locals(frame: types.FrameType) -> dict[str, int]:
    """Returns the names of a function's local variables, and the ids of their values.

    Before Python 3.13, reading them fills a dictionary that belongs to the frame, and would keep old values alive: it
    is emptied again. Where that could be noticed (under a debugger, or if the function reads it itself), nothing is
    read.
    """
    if sys.version_info >= (3, 13):
        return {name: id(value) for name, value in frame.f_locals.items()}
    if sys.gettrace() is not None or frame.f_trace is not None or _READS_LOCALS & set(frame.f_code.co_names):
        return {}
    values = frame.f_locals
    found = {name: id(value) for name, value in values.items()}
    if sys.getrefcount(values) <= _UNSHARED:
        values.clear()
    return found


def local_variable(frame: types.FrameType, name: str) -> Variable:
    """Returns a local variable of a frame."""
    code = frame.f_code
    return Variable("local", name, code.co_filename, _stored_at(code, name), code.co_name)


def global_variable(module: str, name: str) -> Variable:
    """Returns a global variable of a module."""
    file = getattr(sys.modules.get(module), "__file__", None)
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
