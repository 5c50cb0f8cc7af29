"""Parses the functions around recorded lines: which statements assign which variables, and what is returned."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass, field
from functools import cache

from memprof.trace.source_lines import function_around, lines_of


@dataclass(frozen=True)
class Statement:
    """A statement that may keep what a call inside it returns.

    Attributes:
        first: Its first line.
        last: Its last line.
        targets: The names it assigns: those at each position of the value it unpacks, one position where it does not.
        is_call: Whether its value is what a call returns, as it is.
        is_return: Whether it returns that value.
        is_repeated: Whether it is in a loop and makes a single call, so that each call is another run of it.
    """

    first: int
    last: int
    targets: tuple[tuple[str, ...], ...] = ()
    is_call: bool = False
    is_return: bool = False
    is_repeated: bool = False


@dataclass(frozen=True)
class Function:
    """What is known of a function from its source.

    Attributes:
        first: Line of its ``def``.
        statements: Its statements that assign or return, by each of their lines.
        returned: The positions at which each name is returned, with the number of values returned there.
        dropped: Lines at which ``del`` drops each name.
    """

    first: int
    statements: dict[int, Statement] = field(default_factory=dict)
    returned: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    dropped: dict[str, tuple[int, ...]] = field(default_factory=dict)


@cache
def function_at(path: str, line: int) -> Function | None:
    """Returns the function around a line of a file; None where it cannot be read."""
    first, last = function_around(path, line)
    return _parsed(path, first, last) if last else None


def forget_functions() -> None:
    """Drops what was parsed."""
    function_at.cache_clear()
    _parsed.cache_clear()


@cache
def _parsed(path: str, first: int, last: int) -> Function | None:
    try:
        tree = ast.parse(textwrap.dedent("\n".join(lines_of(path)[first:last])))
    except (SyntaxError, ValueError, RecursionError):
        return None
    definition = tree.body[0] if tree.body else None
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    found = Function(first + 1)
    repeated = {
        id(node)
        for loop in own_nodes(definition.body)
        if isinstance(loop, ast.For | ast.While | ast.AsyncFor)
        for node in own_nodes(loop.body)
    }
    for node in own_nodes(definition.body):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.Return):
            statement = _read(node, first, is_in_loop=id(node) in repeated)
            found.statements.update(dict.fromkeys(range(statement.first, statement.last + 1), statement))
        if isinstance(node, ast.Return) and node.value is not None:
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            for place, value in enumerate(values):
                if isinstance(value, ast.Name):
                    found.returned[value.id] = (*found.returned.get(value.id, ()), (place, len(values)))
        if isinstance(node, ast.Delete):
            for name in _names(node.targets):
                found.dropped[name] = (*found.dropped.get(name, ()), first + node.lineno)
    return found


def own_nodes(body: list[ast.stmt]) -> list[ast.AST]:
    """Returns the nodes of a body, without those of functions and classes inside it."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            found.append(node)
            waiting += ast.iter_child_nodes(node)
    return found


def _read(node: ast.Assign | ast.AnnAssign | ast.Return, before: int, *, is_in_loop: bool) -> Statement:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = list(node.targets)
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    positions: tuple[tuple[str, ...], ...] = (tuple(_names(targets)),)
    unpacked = [target for target in targets if isinstance(target, ast.Tuple | ast.List)]
    if unpacked and not any(isinstance(one, ast.Starred) for one in unpacked[0].elts):
        positions = tuple(tuple(_names([one])) for one in unpacked[0].elts)
    return Statement(
        first=before + node.lineno,
        last=before + (node.end_lineno or node.lineno),
        targets=positions if any(positions) else (),
        is_call=isinstance(node.value, ast.Call | ast.Await),
        is_return=isinstance(node, ast.Return),
        is_repeated=is_in_loop and sum(isinstance(one, ast.Call) for one in ast.walk(node)) == 1,
    )


def _names(targets: list[ast.expr]) -> list[str]:
    return [
        node.id
        for target in targets
        for node in ast.walk(target)
        # Not the name that is read in ``x[i] = ...``.
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del)
    ]
