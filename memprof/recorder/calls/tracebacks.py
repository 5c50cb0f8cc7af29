"""Keeps the recorder out of the job's tracebacks, also in functions of torch that it recompiles.

An operator that fails below the dispatch mode propagates through the mode's frame. Those frames are removed from the
traceback where it can still be changed: on exit from each module call, and before Python prints it at the end.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, TracebackType
from typing import Any

from torch._ops import HigherOrderOperator, OpOverload

_PACKAGE = Path(__file__).parents[2]
#: Folders whose frames belong to no one who reads a stack: the recorder's, and the virtual machine's above it.
OWN_CODE = tuple(str(_PACKAGE / name) for name in ("recorder", "virtual"))
_own = [*OWN_CODE]


def hide_frames_of(folder: Path) -> None:
    """Treats the code of another folder as the recorder's: that of a policy that runs the job's operators."""
    if str(folder) not in _own:
        _own.append(str(folder))


def remove_own_frames(error: BaseException) -> None:
    """Removes the recorder's frames from the tracebacks of an error and of its causes."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        here = pending.pop()
        if here is None or id(here) in seen:
            continue
        seen.add(id(here))
        here.__traceback__ = _without_own(here.__traceback__)
        pending += [here.__cause__, here.__context__]


def clean_uncaught() -> None:
    """Makes Python print the current error, if uncaught, without the recorder's frames."""
    present = sys.excepthook
    if getattr(present, "is_memprof", False):
        return

    def print_clean(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        remove_own_frames(error)
        return present(kind, error, _without_own(trace))

    print_clean.is_memprof = True  # type: ignore[attr-defined]
    sys.excepthook = print_clean


def _without_own(trace: TracebackType | None) -> TracebackType | None:
    kept: TracebackType | None = None
    frames = _frames(trace)
    for before, here in reversed(list(zip([None, *frames], frames, strict=False))):
        if not _is_own(here) and not _leads_to_own(here) and not _is_call_of_own(before, here):
            if here.tb_next is not kept:
                here.tb_next = kept
            kept = here
    return kept


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames


def _leads_to_own(trace: TracebackType) -> bool:
    """Whether a frame is torch's dispatch of a higher-order operator to memprof's mode, which dispatches it again."""
    is_dispatch = trace.tb_frame.f_code is HigherOrderOperator.dispatch.__code__
    return is_dispatch and trace.tb_next is not None and _is_own(trace.tb_next)


def _is_call_of_own(before: TracebackType | None, trace: TracebackType) -> bool:
    """Whether a frame is an operator call made by memprof's mode, which torch's own dispatch would not make."""
    return before is not None and _is_own(before) and trace.tb_frame.f_code is OpOverload.__call__.__code__


def _is_own(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(tuple(_own))


def recompiled(function: FunctionType, rewrite: Callable[[ast.FunctionDef], None]) -> CodeType:
    """Compiles a function again from its rewritten source, with the original file name, lines and columns.

    Names used by the additions are looked up in the globals of the function's module.

    Args:
        function: A plain function without free variables; of a decorated one, the function inside its decorators.
        rewrite: Changes the function's syntax tree; added nodes need locations (``ast.copy_location``).

    Raises:
        RuntimeError: The source is missing, or the function has an unexpected form.
    """
    name = function.__qualname__
    if function.__closure__:
        raise RuntimeError(f"cannot recompile {name}: it is a closure")
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise RuntimeError(f"cannot recompile {name}: its source is missing: {error}") from error
    source = "".join(lines)
    indent = len(lines[0]) - len(lines[0].lstrip())
    tree = ast.parse(textwrap.dedent(source))
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise RuntimeError(f"cannot recompile {name}: it is not a plain function")
    definition.decorator_list.clear()  # they stay around the function whose code this becomes
    ast.increment_lineno(tree, first - 1)
    for node in ast.walk(tree):  # dedent shifted the columns; tracebacks underline by column
        for place in ("col_offset", "end_col_offset"):
            if hasattr(node, place):
                setattr(node, place, getattr(node, place) + indent)
    rewrite(definition)
    ast.fix_missing_locations(tree)
    module_code = compile(tree, function.__code__.co_filename, "exec", dont_inherit=True)
    # Defaults, and from Python 3.14 on annotations, have code of their own in front of it.
    named = (each for each in module_code.co_consts if isinstance(each, CodeType) and each.co_name == definition.name)
    code = next(named)
    if code.co_freevars or code.co_varnames[: code.co_argcount] != function.__code__.co_varnames[: code.co_argcount]:
        raise RuntimeError(f"cannot recompile {name}: unexpected arguments")
    return code.replace(co_qualname=function.__code__.co_qualname)
