"""Mutants of the source: mutmut's changes of single expressions, less those that change no result."""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

from lab.mutants.lines import ROOT, SOURCES, digest_of

#: Calls that say something and do nothing, or that speak to the type checker.
_SILENT = {"cast", "TypeVar", "NewType", "warn", "debug", "info", "warning", "error", "exception", "print"}
#: Arguments that change no result, or guard only against mistakes of the caller.
_GUARDS = {"strict", "stacklevel", "doc", "help"}
#: What mutmut's operators for every kind of node look for.
_OPERATIONS = (
    *(cst.BinaryOperation, cst.UnaryOperation, cst.BooleanOperation, cst.ComparisonTarget, cst.AugAssign),
    *(cst.Is, cst.IsNot, cst.In, cst.NotIn, cst.Break, cst.Continue),
)
#: Statements and expressions below which nothing is changed: messages, annotations and imports.
_SKIPPED = (cst.Raise, cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom, cst.Assert, cst.FormattedString)


@dataclass(frozen=True)
class Mutant:
    """One change of one expression.

    Attributes:
        id: Hash of the seed, the function and the change's place in it; a sample holds the mutants with the smallest.
        source: Path of the source file.
        line: The first line that changes, from 1.
        last_line: The last line of the changed expression.
        at_import: It is outside all functions, and so run where the module is imported, and not by a test.
        ordinal: Its place among the mutants of the file.
        operator: Name of mutmut's operator.
    """

    id: str
    source: str
    line: int
    last_line: int
    at_import: bool
    ordinal: int
    operator: str


def sample(count: int, seed: int, cache: Path) -> list[Mutant]:
    """Returns the mutants of a sample: the same ones for the same seed, and a smaller sample is part of a larger one.

    A change of one source file leaves the sample of the others as it was.
    """
    known = json.loads(cache.read_text()) if cache.exists() else {}
    found: list[Mutant] = []
    kept = {}
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        source = str(path.relative_to(ROOT))
        key = f"{source} {digest_of(path)} {digest_of(Path(__file__))} {seed}"
        kept[key] = known.get(key) or [asdict(one) for one in mutants_of(source, path.read_text(), seed)]
        found += [Mutant(**one) for one in kept[key]]
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_text(json.dumps(kept))
    return sorted(found, key=lambda one: one.id)[:count]


def mutated_text(mutant: Mutant, text: str) -> str:
    """Returns the file's text with the change."""
    module, changes = _changes(text)
    node, changed, _ = changes[mutant.ordinal]
    mutated = module.visit(_Replacement(node, changed))
    assert isinstance(mutated, cst.Module)
    return mutated.code


def diff_of(mutant: Mutant, text: str) -> str:
    """Returns the change as a unified diff without context."""
    lines = difflib.unified_diff(text.splitlines(), mutated_text(mutant, text).splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++")))


def lines_that_read(mutant: Mutant, text: str) -> list[int]:
    """Returns the lines of the file that read what the changed line assigns, such as a constant."""
    tree = ast.parse(text)
    assigned = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.lineno <= mutant.line <= (node.end_lineno or 0):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assigned |= {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and _reads(node.args, assigned):  # a default, evaluated at import
            found |= {statement.lineno for statement in node.body}
        elif isinstance(node, ast.Name | ast.Attribute) and _reads(node, assigned):
            found.add(node.lineno)
    return sorted(found)


def _reads(tree: ast.AST, names: set[str]) -> bool:
    return any(
        (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names)
        or (isinstance(node, ast.Attribute) and node.attr in names)
        for node in ast.walk(tree)
    )


def mutants_of(source: str, text: str, seed: int) -> Iterator[Mutant]:
    """Yields the mutants of a file."""
    _, changes = _changes(text)
    seen: Counter[tuple[str, str]] = Counter()
    for ordinal, (_, _, place) in enumerate(changes):
        seen[place.function, place.operator] += 1
        words = f"{seed} {source} {place.function} {place.operator} {seen[place.function, place.operator]}"
        key = hashlib.sha256(words.encode()).hexdigest()[:16]
        yield Mutant(key, source, place.line, place.last_line, place.at_import, ordinal, place.operator)


@dataclass(frozen=True)
class _Place:
    function: str
    line: int
    last_line: int
    at_import: bool
    operator: str


def _changes(text: str) -> tuple[cst.Module, list[tuple[cst.CSTNode, cst.CSTNode, _Place]]]:
    wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    visitor = _Visitor()
    return wrapper.visit(visitor), visitor.changes


class _Visitor(cst.CSTVisitor):
    """Collects the changes of a module, in the order of the text."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[cst.CSTNode, cst.CSTNode, _Place]] = []
        self._names: list[str] = []
        self._functions = 0
        self._ranges: list[CodeRange] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _is_skipped(node):
            return False
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self._names.append(node.name.value)
        if isinstance(node, cst.FunctionDef | cst.Lambda):
            self._functions += 1
        where = self.get_metadata(PositionProvider, node, None)
        self._ranges.append(where if isinstance(where, CodeRange) else self._ranges[-1])
        for kind, operator in mutation_operators:
            if isinstance(node, _OPERATIONS if kind is cst.CSTNode else kind):
                for changed in operator(node):
                    if not _is_equivalent(node, changed):
                        self.changes.append((node, changed, self._place(operator.__name__)))
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if _is_skipped(original_node):
            return
        if isinstance(original_node, cst.FunctionDef | cst.ClassDef):
            self._names.pop()
        if isinstance(original_node, cst.FunctionDef | cst.Lambda):
            self._functions -= 1
        self._ranges.pop()

    def _place(self, operator: str) -> _Place:
        where = self._ranges[-1]
        return _Place(".".join(self._names), where.start.line, where.end.line, self._functions == 0, operator)


class _Replacement(cst.CSTTransformer):
    """Puts one node in the place of another, which is found by its identity."""

    def __init__(self, old: cst.CSTNode, new: cst.CSTNode) -> None:
        super().__init__()
        self._old, self._new = old, new

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:  # type: ignore[override]
        return self._new if original_node is self._old else updated_node


def _is_skipped(node: cst.CSTNode) -> bool:
    """Returns whether nothing below a node is changed."""
    if isinstance(node, _SKIPPED):
        return True
    if isinstance(node, cst.SimpleStatementLine):
        first = node.body[0]
        if isinstance(first, cst.Expr) and isinstance(first.value, cst.SimpleString | cst.ConcatenatedString):
            return True  # a docstring
        if isinstance(first, cst.Assign):
            return any(isinstance(one.target, cst.Name) and one.target.value == "__all__" for one in first.targets)
    if isinstance(node, cst.If):
        return isinstance(node.test, cst.Name) and node.test.value == "TYPE_CHECKING"
    if isinstance(node, cst.Call):
        return _name_of(node.func) in _SILENT or _name_of(node.func).endswith("Error")
    if isinstance(node, cst.Arg):
        return node.keyword is not None and node.keyword.value in _GUARDS
    if isinstance(node, cst.SimpleString):
        return " " in node.value  # words for people
    return False


def _is_equivalent(node: cst.CSTNode, changed: cst.CSTNode) -> bool:
    """Returns whether a change is one of wording, or is made elsewhere: a guard's argument, or a declaration."""
    if isinstance(node, cst.AnnAssign) and node.value is None:
        return True
    if isinstance(node, cst.Call) and isinstance(changed, cst.Call) and len(node.args) >= len(changed.args):
        kept = {id(one) for one in changed.args}
        return any(_is_skipped(one) or _is_wording(one.value) for one in node.args if id(one) not in kept)
    if isinstance(node, cst.Assign | cst.AnnAssign):
        return node.value is not None and _is_wording(node.value)
    return False


def _is_wording(node: cst.BaseExpression) -> bool:
    """Returns whether an expression is a text that people read."""
    if isinstance(node, cst.ConcatenatedString | cst.FormattedString):
        return True
    return isinstance(node, cst.SimpleString) and " " in node.value


def _name_of(node: cst.BaseExpression) -> str:
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""
