"""Recompiles a torch function with additions, keeping tracebacks through it unchanged."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import CodeType, FunctionType


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
