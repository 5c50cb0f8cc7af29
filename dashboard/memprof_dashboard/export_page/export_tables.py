"""The tables of a report as HTML: live bytes at one moment, broken down by each attribute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from memprof.analysis.report.breakdown import Breakdown, K, Part
from memprof.analysis.report.module_tree import ModuleTree
from memprof.analysis.report.report import Report
from memprof.analysis.report.table_rows import TreeRow, choose_rows, find_largest
from memprof.trace.operator_facts import short_name
from memprof.units import format_bytes, format_percent, format_us
from memprof_dashboard.markup import Html, element, name, table, text
from memprof_dashboard.palette import fill_of

_BEFORE = "(allocated before the step)"
_NOWHERE = "(allocated before the step, or no stack)"
_OUTSIDE = "(outside any module)"
#: Modules that would free less than this share of the saved bytes are omitted from the table.
_WORTH_A_ROW = 0.01


def categories(report: Report) -> Html:
    """Returns live bytes by category, with each category's own maximum over the step."""
    split = report.shown.by_category
    held = {str(part.key): part.bytes for part in split.parts}
    elsewhere = {category: 0 for category in report.category_maxima if category not in held}
    rows = []
    for category, size in (held | elsewhere).items():
        maximum = report.category_maxima.get(category)
        rows.append(
            [
                category_name(category),
                format_bytes(size),
                _share(size, split.total_bytes),
                _bar(category, size, split.total_bytes),
                format_bytes(maximum.maximum_bytes) if maximum else "",
                f"{maximum.op_id:,}" if maximum else "",
            ]
        )
    rows.append(["total", format_bytes(split.total_bytes), _share(split.total_bytes, split.total_bytes), "", "", ""])
    heads = ["category", ">bytes", ">share", "", ">maximum", ">at operator"]
    return table(heads, rows, {len(rows) - 1: "total"})


def phase_peaks(report: Report) -> Html:
    """Returns the peak of each phase."""
    rows = [
        [
            moment.phase,
            format_bytes(moment.allocated_bytes),
            f"{moment.op_id:,}",
            short_name(moment.op),
            moment.module_title or "",
            moment.source.place if moment.source else "",
        ]
        for moment in report.phase_peaks
    ]
    return table(["phase", ">maximum", ">at operator", "operator", "module", "line"], rows)


def modules(report: Report, split: Breakdown[int], limit: int) -> Html:
    """Returns bytes by module as a tree; a module's own bytes and its direct children sum to its total."""
    chosen = choose_rows(split, report.tree, limit) if split.parts else ()
    rows = [
        [
            _module_name(report.tree, row),
            format_bytes(row.bytes),
            _share(row.bytes, split.total_bytes),
            format_bytes(row.own_bytes) if row.own_bytes else "",
        ]
        for row in chosen
    ]
    marked = {place: "rest" for place, row in enumerate(chosen) if row.node is None}
    return table(["module", ">bytes", ">share", ">own bytes"], rows, marked)


def source_lines(report: Report, limit: int) -> Html:
    """Returns bytes by the line of user code that allocated them."""
    return _flat(
        report.shown.by_source, limit, ("line", "function"), lambda line: (line.place, line.function), _NOWHERE
    )


def operators(report: Report, limit: int) -> Html:
    """Returns bytes by the operator that allocated them."""
    return _flat(report.shown.by_op, limit, ("operator",), lambda op: (short_name(op),), _BEFORE)


def largest(report: Report, limit: int) -> Html:
    """Returns the largest storages; the last rows sum the others and the operator's workspace."""
    holding = report.shown.holding
    found = find_largest(holding, report.sources, limit)
    rows = [
        [
            format_bytes(storage.allocated_bytes),
            category_name(storage.category),
            storage.name or storage.module_title or "",
            f"{storage.shape} {storage.dtype}".strip(),
            short_name(storage.op) if storage.op else "before the step",
            storage.source.place if storage.source else "",
            "older" if storage.age_ops is None else f"{storage.age_ops:,}",
        ]
        for storage in found
    ]
    marked = {}
    rest = len(holding.rows) - len(found)
    if rest:
        size = int(holding.bytes.sum()) - sum(storage.allocated_bytes for storage in found)
        marked[len(rows)] = "rest"
        rows.append([format_bytes(size), "", f"{rest:,} other storage{'s' if rest > 1 else ''}", "", "", "", ""])
    if holding.workspace_bytes:
        marked[len(rows)] = "rest"
        kept = "memory allocated inside the operator"
        rows.append([format_bytes(holding.workspace_bytes), category_name("workspace"), kept, "", "", "", ""])
    return table(
        [">bytes", "category", "name or module", "tensor", "allocated by", "line", ">age in operators"], rows, marked
    )


def recompute(report: Report, limit: int) -> Html:
    """Returns recompute cost versus bytes freed for each module, best first; "" for none."""
    worth = _WORTH_A_ROW * report.saved_summary.by_module.total_bytes
    costs = [cost for cost in report.recompute if cost.freed_bytes >= worth][:limit]
    rows = [
        [
            _counted(report.tree.title(cost.node), int(report.tree.counts[cost.node])),
            format_bytes(cost.freed_bytes),
            format_us(cost.time_us),
            _share(cost.time_us, report.step.duration_us) if math.isfinite(cost.bytes_per_us) else "",
        ]
        for cost in costs
    ]
    return table(["module", ">frees", ">recompute time", ">share of step"], rows) if rows else Html("")


def ranks(report: Report) -> Html:
    """Returns the peak of each rank of a distributed job."""
    rows = [
        [
            str(one.rank),
            one.device,
            format_bytes(one.peak.allocated_bytes) if one.peak else "none",
            one.peak.phase if one.peak else "",
            format_us(one.step_time_us),
            ", ".join(
                remark
                for remark, is_so in (
                    ("highest", one.rank == report.worst_rank),
                    ("shown below", one.rank == report.rank),
                )
                if is_so
            ),
        ]
        for one in report.ranks
    ]
    return table([">rank", "device", ">peak", "phase", ">step time", ""], rows)


def steps(report: Report) -> Html:
    """Returns every recorded step."""
    rows = [
        [
            f"{one.step:,}",
            one.kind.replace("_", " ") + ("" if one.is_complete else ", incomplete"),
            format_us(one.duration_us),
            format_bytes(one.peak.allocated_bytes) if one.peak else "",
            one.peak.phase if one.peak else "",
        ]
        for one in report.steps
    ]
    return table([">step", "kind", ">time", ">peak", "phase"], rows)


def category_name(category: str) -> Html:
    """Returns a category's name with its colour swatch."""
    fill = fill_of(category)
    swatch = element("span", kind="swatch", style=f"background:{fill.colour}")
    return element("span", swatch, name(fill.label, 40), kind="category")


def _bar(category: str, size: int, whole: int) -> Html:
    width = 100 * size / whole if whole > 0 and size > 0 else 0
    if not width:
        return Html("")
    bar = element("span", kind="bar", style=f"width:{width:.1f}%;background:{fill_of(category).colour}")
    return element("div", bar, kind="bars", aria_hidden="true")


def _flat(
    split: Breakdown[K], limit: int, heads: Sequence[str], named: Callable[[K], Sequence[str]], nowhere: str
) -> Html:
    """Returns a breakdown, largest part first; the last row sums the omitted parts, so that rows sum to the total."""
    blanks = [""] * (len(heads) - 1)
    parts, rest, cut = split.top(limit)
    rows: list[list[str]] = []
    marked = {}
    for part in parts:
        texts = [nowhere, *blanks] if part.key is None else list(named(part.key))
        if part.key is None:
            marked[len(rows)] = "rest"
        rows.append([*texts, *_figures(part, split.total_bytes)])
    if rest is not None:
        marked[len(rows)] = "rest"
        rows.append([f"{cut:,} others", *blanks, *_figures(rest, split.total_bytes)])
    return table([*heads, ">bytes", ">share", ">storages"], rows, marked)


def _figures(part: Part[K], whole: int) -> tuple[str, str, str]:
    return format_bytes(part.bytes), _share(part.bytes, whole), f"{part.storages:,}" if part.storages else ""


def _module_name(tree: ModuleTree, row: TreeRow) -> Html:
    """Returns ``label Type x12``, indented: the type where it differs from the label, the count where folded."""
    indent = f"padding-left:{1.3 * row.depth:.1f}em"
    if row.node is None:
        return element("span", f"{row.cut:,} others" if row.cut else _OUTSIDE, style=indent)
    label, kind = tree.labels[row.node], tree.types[row.node]
    count = int(tree.counts[row.node])
    parts = [name(label, 60)]
    if kind != label:
        parts.append(name(kind, 40, kind="name type"))
    if count > 1:
        parts.append(element("span", f"\N{MULTIPLICATION SIGN}{count:,}", kind="type"))
    return element("div", Html(" ".join(parts)), style=indent)


def _counted(title: str, count: int) -> Html:
    return Html(name(title) + (text(f" \N{MULTIPLICATION SIGN}{count:,}") if count > 1 else ""))


def _share(part: float, whole: float) -> str:
    return format_percent(part / whole) if whole > 0 else ""
