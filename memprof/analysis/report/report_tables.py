"""The tables of a report: what each column is called, its unit, and how it is read, for text, HTML and JSON alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from memprof.analysis.report.breakdown import WORKSPACE, Breakdown
from memprof.analysis.report.module_tree import ModuleTree
from memprof.analysis.report.moments import CategoryMaximum
from memprof.analysis.report.report import MomentSplit, Report
from memprof.analysis.report.sources import SourceLine
from memprof.analysis.report.table_rows import TreeRow, choose_rows, every_row, find_largest
from memprof.analysis.table import (
    BYTES,
    COUNT,
    NAME,
    NUMBER,
    SHARE,
    TEXT,
    TEXTS,
    US,
    Cell,
    Column,
    FactTable,
    Read,
    shown,
)
from memprof.trace.operator_facts import short_name
from memprof.units import format_count, format_percent

BEFORE = "(allocated before the step)"
NO_STACK = "(allocated before the step, or no stack)"
OUTSIDE = "(outside any module)"
_FRAMES_SHOWN = 6
#: Sources of a smaller share of a category, which would be shown as 0.0 %, are left out.
_LEAST_SHARE = 0.0005


def _source(read: Callable[[Any], SourceLine | None], **more: Any) -> tuple[Column, ...]:
    """Returns the columns of a line of the user's code, of which its place is shown."""

    def part(name: str) -> Read:
        return lambda item: getattr(read(item), name, None)

    return (
        Column("source", "line", NAME, part("place"), **more),
        Column("file", None, TEXT, part("file")),
        Column("line", None, NUMBER, part("line")),
        Column("function", None, TEXT, part("function")),
    )


def _short_op(op: str | None) -> str | None:
    """Strips torch's own namespace and the default overload from an operator's name."""
    return None if op is None else short_name(op)


@dataclass(frozen=True)
class CategoryBytes:
    """One category of live memory: its bytes at a moment, its maximum, and how it was determined, by bytes."""

    category: str
    bytes: int
    maximum: CategoryMaximum | None
    sources: Mapping[str, int]


def _sources(one: CategoryBytes) -> str:
    """Formats how the bytes of a category were determined: ``phases``, or ``size 90 %, phases 10 %``."""
    whole = sum(one.sources.values())
    found = {source: size for source, size in one.sources.items() if size > _LEAST_SHARE * whole} or one.sources
    if len(found) < 2:
        return "".join(found)
    return ", ".join(f"{source} {format_percent(size / whole)}" for source, size in found.items())


def _category(name: str) -> Cell:
    return Cell(name, category=name)


CATEGORIES = (
    shown("category", TEXT, lambda one: _category(one.category)),
    shown("bytes", BYTES),
    shown("share", SHARE, attrgetter("bytes")),
    shown("", SHARE, lambda one: Cell("", category=one.category, bar=one.bytes), key="bar", is_bar=True),
    Column("maximum_bytes", "own maximum", BYTES, lambda one: one.maximum and one.maximum.maximum_bytes),
    Column("op_id", "at operator", NUMBER, lambda one: one.maximum and one.maximum.op_id),
    shown("determined by", TEXT, _sources, is_optional=True),
)


def category_rows(report: Report) -> list[CategoryBytes]:
    """Returns every category of the step: those live at the shown moment, the largest first, then the others."""
    held = {str(part.key): part.bytes for part in report.shown.by_category.parts}
    elsewhere = {category: 0 for category in report.category_maxima if category not in held}
    sources = report.shown.category_sources
    return [
        CategoryBytes(category, size, report.category_maxima.get(category), sources.get(category, {}))
        for category, size in (held | elsewhere).items()
    ]


def categories(report: Report) -> FactTable:
    """Returns the live bytes by category, with each category's own maximum over the step."""
    whole = report.shown.by_category.total_bytes
    table = FactTable(CATEGORIES, category_rows(report), whole)
    table.add("total", category="total", bytes=whole, share=whole)
    return table


MOMENTS = (
    Column("step", None, NUMBER),
    Column("phase", "phase"),
    Column("allocated_bytes", "maximum", BYTES),
    Column("op_id", "at operator", NUMBER),
    Column("op", None),
    shown("operator", TEXT, lambda one: _short_op(one.op)),
    Column("module", None),
    shown("module", NAME, attrgetter("module_title"), key="title"),
    *_source(attrgetter("source")),
)


def phase_peaks(report: Report) -> FactTable:
    """Returns the peak of each phase."""
    return FactTable(MOMENTS, report.phase_peaks)


@dataclass(frozen=True)
class ModuleBytes:
    """A row of a module tree, with the number of storages of the module itself."""

    tree: ModuleTree
    row: TreeRow
    storages: int = 0

    @property
    def name(self) -> Cell:
        """``label Type x12``, indented: the type if the label differs from it, the count if the node is folded."""
        node, depth = self.row.node, self.row.depth
        if node is None:
            return Cell(_other(self.row.cut, "module") if self.row.cut else OUTSIDE, depth=depth)
        label, kind, count = self.tree.labels[node], self.tree.types[node], int(self.tree.counts[node])
        notes = [kind] if kind != label else []
        return Cell(label, " ".join([*notes, *times(count)]), depth=depth)

    def of_node(self, names: tuple[str, ...]) -> str | None:
        """Returns what the tree has for the module; None outside any."""
        return None if self.row.node is None else names[self.row.node]


MODULES = (
    Column("module", None, TEXT, lambda one: one.of_node(one.tree.names)),
    Column("type", None, TEXT, lambda one: one.of_node(one.tree.types)),
    Column("bytes", None, BYTES, lambda one: one.row.own_bytes),
    shown("module", TEXT, attrgetter("name"), key="name"),
    Column("with_children_bytes", "bytes", BYTES, lambda one: one.row.bytes, "submodules included"),
    shown("share", SHARE, lambda one: one.row.bytes),
    shown("own bytes", BYTES, lambda one: one.row.own_bytes or None, meaning="without submodules"),
    Column("storages", None, COUNT),
)


def modules(tree: ModuleTree, split: Breakdown[int], limit: int) -> FactTable:
    """Returns bytes by module as a tree; a module's own bytes and its child rows sum to its total."""
    rows = choose_rows(split, tree, limit) if split.parts else ()
    items = [ModuleBytes(tree, row) for row in rows]
    return FactTable(MODULES, items, split.total_bytes, lambda one: one.row.node is None)


def module_rows(tree: ModuleTree, split: Breakdown[int]) -> Iterator[ModuleBytes]:
    """Returns each module with bytes of its own or in its children, those with the most bytes of their own first."""
    storages = {part.key: part.storages for part in split.parts}
    for row in every_row(split, tree):
        yield ModuleBytes(tree, row, storages.get(row.node, 0))


_PART = (
    Column("bytes", "bytes", BYTES),
    shown("share", SHARE, attrgetter("bytes")),
    Column("storages", None, COUNT),
    shown("storages", COUNT, lambda part: part.storages or None, key="count"),
)
OPERATORS = (
    Column("op", None, TEXT, attrgetter("key")),
    shown("operator", TEXT, lambda part: _short_op(part.key), missing=BEFORE, key="name"),
    *_PART,
)
LINES = (
    *_source(attrgetter("key"), missing=NO_STACK)[:3],
    Column("function", "function", TEXT, lambda part: part.key and part.key.function),
    *_PART,
)
METADATA = (Column("metadata", "metadata", TEXT, attrgetter("key"), missing="(none)"), *_PART)
PHASES = (Column("phase", "allocated in", TEXT, attrgetter("key"), missing=BEFORE), *_PART)


def _frames(part: Any) -> Cell:
    lines = [f"{frame.place} {frame.function}" for frame in (part.key or ())[:_FRAMES_SHOWN]] or [NO_STACK]
    hidden = len(part.key or ()) - _FRAMES_SHOWN
    return Cell(lines[0], lines=(*lines[1:], *([f"... {hidden} more"] if hidden > 0 else [])))


STACKS = (
    Column(
        "frames",
        None,
        TEXTS,
        lambda part: [f"{line.file}:{line.line}:{line.function}" for line in part.key or ()],
    ),
    *_PART,
    shown("frames, innermost first", TEXT, _frames, key="stack"),
)
#: The splits of a moment, by their names in it, which are their keys in JSON.
SPLITS = {"by_op": OPERATORS, "by_source": LINES, "by_stack": STACKS, "by_phase": PHASES, "by_metadata": METADATA}


def parts(name: str, shown: MomentSplit, limit: int | None = None) -> FactTable:
    """Returns a split of a moment, largest part first; the last row sums the rest, so that the rows sum to the total.

    Args:
        name: One of SPLITS.
        shown: The moment.
        limit: Maximum number of rows; None for all.
    """
    split: Breakdown[Any] = getattr(shown, name)
    kept, rest, cut = split.top(limit or len(split.parts))
    table = FactTable(SPLITS[name], kept, split.total_bytes, lambda part: part.key is None)
    if rest is not None:
        named = next(column.key for column in table.columns if not column.unit.is_number)
        figures = {"bytes": rest.bytes, "share": rest.bytes, "count": rest.storages or None}
        table.add("rest", **{named: Cell(_other(cut, "stack" if name == "by_stack" else "row"))}, **figures)
    return table


LARGEST = (
    Column("allocated_bytes", "bytes", BYTES),
    Column("requested_bytes", None, BYTES),
    Column("category", None),
    shown("category", TEXT, lambda one: _category(one.category), key="group"),
    Column("name", None, TEXT, lambda one: one.name or None),
    Column("module", None),
    shown("name or module", NAME, lambda one: one.name or one.module_title, key="title"),
    Column("metadata", "metadata", NAME, lambda one: one.metadata or None, is_optional=True),
    Column("shape", None, TEXT, lambda one: one.shape or None),
    Column("dtype", None, TEXT, lambda one: one.dtype or None),
    shown("tensor", TEXT, lambda one: f"{one.shape} {one.dtype}".strip()),
    Column("op", None),
    shown("allocated by", TEXT, lambda one: _short_op(one.op), missing=BEFORE, is_wide=True),
    *_source(attrgetter("source")),
    Column("created_op_id", None, NUMBER),
    Column("freed_op_id", None, NUMBER),
    Column("age_ops", "age in operators", COUNT, missing="older"),
    Column("age_us", None, US),
)


def largest(report: Report, limit: int) -> FactTable:
    """Returns the largest storages; the last rows sum the others and the operator's workspace."""
    holding = report.shown.holding
    found = find_largest(holding, report.sources, limit)
    table = FactTable(LARGEST, found)
    if rest := len(holding.rows) - len(found):
        size = int(holding.bytes.sum()) - sum(storage.allocated_bytes for storage in found)
        table.add("rest", allocated_bytes=size, group=Cell("other"), title=Cell(f"({format_count(rest, 'storage')})"))
    if holding.workspace_bytes:
        about = Cell("(inside the operator)")
        table.add("rest", allocated_bytes=holding.workspace_bytes, group=_category(WORKSPACE), title=about)
    return table


def _other(count: int, what: str) -> str:
    return f"other ({format_count(count, what)})"


def times(count: int) -> list[str]:
    """Returns ``x12`` for a module that stands for several."""
    return [f"x{count}"] if count > 1 else []
