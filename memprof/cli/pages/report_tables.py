"""The tables of `memprof report`, drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from memprof.analysis.report.breakdown import Breakdown, Holding, K, Part
from memprof.analysis.report.module_tree import ModuleTree
from memprof.analysis.report.report import MomentSplit, Report
from memprof.analysis.report.table_rows import TreeRow, choose_rows, find_largest
from memprof.analysis.report.whole_run import DeviceUse, HostProcess
from memprof.cli.page import TailCell, cell, make_table, printable
from memprof.trace.operator_facts import short_name
from memprof.units import format_bytes, format_percent, format_us

_BEFORE = "(alive before the step)"
_NOWHERE = "(before recording, or no stack)"
_OUTSIDE = "(outside any module)"
_COLOURS = {
    "parameter": "blue",
    "buffer": "bright_blue",
    "gradient": "magenta",
    "optimizer_state": "cyan",
    "input": "white",
    "activation": "green",
    "temporary": "yellow",
    "workspace": "bright_yellow",
    "collective": "bright_magenta",
    "unknown": "red",
}
_BAR_WIDTH = 16
_FRAMES_SHOWN = 6
#: Modules that would free less than this share of the saved tensors are left out of the table.
_WORTH_A_ROW = 0.01
#: Sources of a smaller share of a category, which would be shown as 0.0 %, are left out.
_LEAST_SHARE = 0.0005


def categories(report: Report, has_bars: bool) -> Table:
    """Draws the live bytes by category, with each category's own maximum over the step."""
    split = report.shown.by_category
    held = {str(part.key): part.bytes for part in split.parts}
    elsewhere = {category: 0 for category in report.category_maxima if category not in held}
    sources = report.shown.category_sources
    known = ["determined by"] if sources else []
    bars = [""] if has_bars else []
    table = make_table("category", ">bytes", ">share", *bars, ">own maximum", ">at operator", *known)
    for category, size in (held | elsewhere).items():
        maximum = report.category_maxima.get(category)
        colour = _COLOURS.get(category, "")
        bar = "█" * round(_BAR_WIDTH * size / split.total_bytes) if split.total_bytes > 0 else ""
        table.add_row(
            cell(category, colour),
            format_bytes(size),
            _share(size, split.total_bytes),
            *([Text(bar, style=colour)] if has_bars else []),
            format_bytes(maximum.maximum_bytes) if maximum else "",
            str(maximum.op_id) if maximum else "",
            *([_sources(sources.get(category, {}))] if known else []),
        )
    table.add_row("total", format_bytes(split.total_bytes), _share(split.total_bytes, split.total_bytes), style="bold")
    return table


def _sources(sizes: dict[str, int]) -> str:
    """Formats how the bytes of a category were determined: ``phases``, or ``size 90 %, phases 10 %``."""
    whole = sum(sizes.values())
    shown = {source: size for source, size in sizes.items() if size > _LEAST_SHARE * whole} or sizes
    if len(shown) < 2:
        return "".join(shown)
    return ", ".join(f"{source} {_share(size, whole)}" for source, size in shown.items())


def phase_peaks(report: Report) -> Table:
    """Draws the peak of each phase."""
    table = make_table("phase", ">maximum", ">at operator", "operator", "module", "line")
    for moment in report.phase_peaks:
        table.add_row(
            cell(moment.phase),
            format_bytes(moment.allocated_bytes),
            str(moment.op_id),
            cell(short_name(moment.op)),
            TailCell(moment.module_title or ""),
            TailCell(moment.source.place if moment.source else ""),
        )
    return table


def module_tree(report: Report, split: Breakdown[int], limit: int) -> Table:
    """Draws bytes by module as a tree; a module's own bytes and its child rows sum to its total."""
    table = make_table("module", ">bytes", ">share", ">of its own")
    if not split.parts:
        return table
    for row in choose_rows(split, report.tree, limit):
        table.add_row(
            _tree_cell(report.tree, row),
            format_bytes(row.bytes),
            _share(row.bytes, split.total_bytes),
            format_bytes(row.own_bytes) if row.own_bytes else "",
        )
    return table


def operators(shown: MomentSplit, limit: int) -> Table:
    """Draws bytes by allocating operator."""
    return _flat(shown.by_op, limit, ("operator",), lambda name: (short_name(name),), _BEFORE)


def source_lines(shown: MomentSplit, limit: int) -> Table:
    """Draws bytes by allocating line of user code."""
    return _flat(shown.by_source, limit, ("line", "function"), lambda line: (line.place, line.function), _NOWHERE)


def phases(shown: MomentSplit) -> Table:
    """Draws bytes by the phase that allocated them."""
    return _flat(shown.by_phase, len(shown.by_phase.parts), ("made in",), lambda phase: (phase,), _BEFORE)


def stacks(shown: MomentSplit, limit: int) -> Table:
    """Draws bytes by Python allocation stack: its innermost user frames."""
    parts, rest, cut = shown.by_stack.top(limit)
    table = make_table(">bytes", ">share", ">storages", "frames, innermost first")
    for part in parts:
        frames = part.key or ()
        lines = [f"{frame.place} {frame.function}" for frame in frames[:_FRAMES_SHOWN]]
        if len(frames) > _FRAMES_SHOWN:
            lines.append(f"... {len(frames) - _FRAMES_SHOWN} more")
        for number, line in enumerate(lines or [_NOWHERE]):
            figures = _figures(part, shown.by_stack.total_bytes) if number == 0 else ("", "", "")
            table.add_row(*figures, cell(line, "dim" if number else ""))
    if rest is not None:
        table.add_row(*_figures(rest, shown.by_stack.total_bytes), cell(_other(cut, "stack"), "dim"))
    return table


def largest(report: Report, holding: Holding, limit: int) -> Table:
    """Draws the largest single storages; the last rows sum the others and the operator's workspace."""
    table = make_table(">bytes", "category", "module", "tensor", "line", ">ops old")
    found = find_largest(holding, report.sources, limit)
    for storage in found:
        table.add_row(
            format_bytes(storage.allocated_bytes),
            cell(storage.category, _COLOURS.get(storage.category, "")),
            TailCell(storage.name or storage.module_title or ""),
            cell(f"{storage.shape} {storage.dtype}".strip()),
            TailCell(storage.source.place if storage.source else ""),
            "older" if storage.age_ops is None else str(storage.age_ops),
        )
    rest = len(holding.rows) - len(found)
    if rest:
        size = int(holding.bytes.sum()) - sum(storage.allocated_bytes for storage in found)
        table.add_row(format_bytes(size), cell("other", "dim"), cell(f"({rest} storages)", "dim"))
    if holding.workspace_bytes:
        table.add_row(format_bytes(holding.workspace_bytes), cell("workspace", _COLOURS["workspace"]))
    return table


def recompute(report: Report, limit: int) -> Table:
    """Draws each module's recompute time and the bytes it would free, best ratio first."""
    table = make_table("module", ">frees", ">recompute", ">of step", ">work", ">frees per us")
    worth = _WORTH_A_ROW * report.saved_summary.by_module.total_bytes
    costs = [cost for cost in report.recompute if cost.freed_bytes >= worth]
    for cost in costs[:limit]:
        is_known = math.isfinite(cost.bytes_per_us)
        count = report.tree.counts[cost.node]
        table.add_row(
            TailCell(report.tree.title(cost.node) + (f" x{count}" if count > 1 else "")),
            format_bytes(cost.freed_bytes),
            format_us(cost.time_us),
            _share(cost.time_us, report.step.duration_us) if is_known else "",
            _format_flops(cost.flops),
            format_bytes(cost.bytes_per_us) if is_known else "",
        )
    return table


def device(use: DeviceUse) -> Table:
    """Draws how the memory of a whole device is divided; the rows sum to its capacity."""
    table = make_table("held by", ">bytes", ">share")
    parts = [("torch's allocator in this process (reserved)", use.reserved_bytes)]
    if use.own_bytes is None:
        parts.append(("CUDA context, NCCL, libraries and other processes", use.other_bytes))
    else:
        parts.append(("CUDA context, NCCL and libraries in this process", use.own_bytes))
        parts.append(("other processes", use.other_bytes))
    parts.append(("free", use.free_bytes))
    for name, size in parts:
        table.add_row(cell(name), format_bytes(size), _share(size, use.total_bytes))
    if use.pinned_bytes:
        table.add_row(cell("in addition, pinned host memory", "dim"), format_bytes(use.pinned_bytes), "")
    return table


def host(report: Report) -> Table:
    """Draws the host memory of the job's processes; processes of one role share a row."""
    table = make_table("process", ">resident", ">of its own")
    roles: dict[str, list[HostProcess]] = {}
    for process in report.host:
        roles.setdefault(process.role, []).append(process)
    for role, processes in roles.items():
        private = [one.maximum_private_bytes for one in processes if one.maximum_private_bytes is not None]
        many = len(processes) > 1
        table.add_row(
            cell(f"{len(processes)} processes as {role}, largest" if many else role),
            format_bytes(max(one.maximum_rss_bytes for one in processes)),
            format_bytes(max(private)) if private else "",
        )
    return table


def _flat(
    split: Breakdown[K], limit: int, headers: Sequence[str], name: Callable[[K], Sequence[str]], nowhere: str
) -> Table:
    """Draws a breakdown, largest part first; the last row sums the rest, so that the rows sum to the total."""
    table = make_table(*headers, ">bytes", ">share", ">storages")
    blanks = [""] * (len(headers) - 1)
    parts, rest, cut = split.top(limit)
    for part in parts:
        texts = [nowhere, *blanks] if part.key is None else name(part.key)
        table.add_row(*(cell(text) for text in texts), *_figures(part, split.total_bytes))
    if rest is not None:
        table.add_row(cell(_other(cut, "row"), "dim"), *blanks, *_figures(rest, split.total_bytes))
    return table


def _figures(part: Part[K], whole: int) -> tuple[str, str, str]:
    return format_bytes(part.bytes), _share(part.bytes, whole), str(part.storages) if part.storages else ""


def _tree_cell(tree: ModuleTree, row: TreeRow) -> Text:
    indent = "  " * row.depth
    if row.node is None:
        return cell(indent + (_other(row.cut, "module") if row.cut else _OUTSIDE), "dim")
    return _module_cell(indent, tree.labels[row.node], tree, row.node)


def _module_cell(indent: str, label: str, tree: ModuleTree, node: int) -> Text:
    """Makes ``label Type x12``: the type if the label differs from it, the count if the node is folded."""
    text = cell(indent + label)
    if tree.types[node] != label:
        text.append(f" {printable(tree.types[node])}", style="dim")
    if tree.counts[node] > 1:
        text.append(f" x{tree.counts[node]}", style="dim")
    return text


def _other(count: int, what: str) -> str:
    return f"other ({count} {what}{'s' if count > 1 else ''})"


def _share(part: float, whole: float) -> str:
    return format_percent(part / whole) if whole > 0 else ""


def _format_flops(flops: int) -> str:
    if not flops:
        return ""
    power = min(int(math.log10(flops) // 3), 5)
    return f"{flops / 1000**power:.1f} {('', 'k', 'M', 'G', 'T', 'P')[power]}flop"
