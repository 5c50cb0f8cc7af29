"""A report as one self-contained HTML file: to read, print or attach to an issue."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from memprof.analysis.ranks.rank_tables import peaks
from memprof.analysis.report import report_tables as tables
from memprof.analysis.report import run_tables
from memprof.analysis.report.module_tree import module_tree
from memprof.analysis.report.report import Report, build_report
from memprof.trace.manifest import PREDICTED
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_percent, format_us
from memprof.version import __version__
from memprof_dashboard.export_page.export_recording import commands, date_of, has_device, recording
from memprof_dashboard.figures.boxes import treemap
from memprof_dashboard.figures.shared import CONFIG
from memprof_dashboard.figures.timeline import overview, timeline
from memprof_dashboard.figures.timeline_marks import Marks
from memprof_dashboard.markup import Html, element, name, section, shorten, table, text, with_contents
from memprof_dashboard.palette import RECOMPUTED, RECOMPUTED_COLOUR, THEMES, Theme, fill_of, phase_colours
from memprof_dashboard.sources import Rank
from memprof_dashboard.views.boxes import boxes_by_module, bytes_by_node

_ROWS = 10
_TREE_ROWS = 18
_LARGEST_ROWS = 20
_SCREEN = CONFIG | {"scrollZoom": False}
#: The capacity line is drawn only where capacity is at most this many times the peak.
_CAPACITY_IN_SIGHT = 3


def export_html(
    trace: Trace,
    *,
    rank: int | None = None,
    step_number: int | None = None,
    op_id: int | None = None,
    rows: int | None = None,
) -> str:
    """Writes the contents of `memprof report`, with figures, as one HTML page.

    The page loads nothing: scripts and styles are inline, and its content security policy forbids anything else. All
    text from the recording is escaped.

    Args:
        trace: The recording.
        rank: The rank to report on; None for the one with the highest peak.
        step_number: The step to report on; None for the fullest step.
        op_id: The moment to show, counted from 0 in the step; None for the peak.
        rows: Rows per table; None for what suits.

    Raises:
        BadInputError: The recording holds no operators, or is damaged.
        UsageError: There is no such rank, step or operator.
    """
    report = build_report(trace, rank=rank, step_number=step_number, op_id=op_id, fold_layers=True)
    shown = Rank(trace.rank_trace(report.rank))
    bundle, script = plot_bundle(), _resource("export.js")
    title = f"memprof: {shorten(report.manifest.target or trace.path.name, 80)}"
    parts = {
        "policy": html.escape(_policy(gzip.decompress(bundle).decode(), script)),
        "generator": html.escape(f"memprof {__version__}"),
        "title": text(title),
        "body": with_contents(_body(report, shown, rows)),
        "figures": _letters(gzip.compress(_as_json(report, shown).encode(), mtime=0)),
        "plotly": _letters(bundle),
        "script": script,
    }
    # In one pass, so that substituted text is not expanded again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _resource("export.html"))


def _file(name: str) -> Traversable:
    return files("memprof_dashboard.export_page").joinpath(name)


def _resource(name: str) -> str:
    return _file(name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def plot_bundle() -> bytes:
    """Returns the part of plotly.js that draws the figures, compressed: `make plot-bundle` builds it."""
    return _file("plotly.js.gz").read_bytes()


def _letters(content: bytes) -> str:
    """Returns bytes in letters, which cannot close the element around them."""
    return base64.b64encode(content).decode()


def _as_json(report: Report, rank: Rank) -> str:
    return json.dumps({"config": _SCREEN, "themes": _figures(report, rank)}, allow_nan=False)


def _figures(report: Report, rank: Rank) -> dict[str, dict[str, Any]]:
    return {theme.name: _figures_in(report, rank, theme) for theme in THEMES.values()}


def _figures_in(report: Report, rank: Rank, theme: Theme) -> dict[str, Any]:
    history = rank.history
    first, end = rank.step_range(report.step.number)
    capacity = report.manifest.machine.capacity_bytes
    is_seen = has_device(report.manifest) and capacity < _CAPACITY_IN_SIGHT * report.at_peak.moment.allocated_bytes
    at = first + report.shown.moment.op_id
    marks = Marks(at=at + 0.5, capacity_bytes=capacity if is_seen else 0)
    tree = module_tree(rank.modules)
    boxes = treemap(boxes_by_module(bytes_by_node(history, tree, at), tree), theme)
    # Laid over the cells, hatchings ask for one colour below them, and complain of a list.
    boxes.update_traces(marker={"pattern": {"fillmode": "replace"}}, selector={"type": "treemap"})
    boxes.layout.template = None
    return {
        "timeline": timeline(history, first, end, theme, marks).to_plotly_json(),
        "overview": overview(history, first, end, theme).to_plotly_json(),
        "treemap": json.loads(boxes.to_json() or "{}"),
    }


def _body(report: Report, rank: Rank, rows: int | None) -> str:
    shown = report.shown
    when = "at the peak" if report.at_moment is None else f"during operator {shown.moment.op_id:,}"
    first, end = rank.step_range(report.step.number)
    place = f"Operator {shown.moment.op_id:,} of the {end - first:,} of step {report.step.number}"
    of_tree = rows or _TREE_ROWS
    parts = [
        _headline(report),
        *_ranks(report),
        section(
            f"Memory during step {report.step.number}",
            "Live bytes during each operator, by category. The highest point is the exact peak; the vertical line "
            "marks the moment of the tables below. Operators are numbered across the whole recording: the step begins "
            f"at {first:,}.",
            _hint("Drag to zoom, double-click to reset."),
            _plot("timeline", "live bytes during the step, by category; the table below has the figures at the peak"),
            _phases(rank),
        ),
        section(
            "Whole recording",
            f"{rank.history.ops:,} operators; the step above is marked. Growth from step to step indicates a leak.",
            _plot("overview", "total live bytes over the whole recording"),
        ),
        section(
            f"Live bytes {when}, by category",
            f"{place}. Every table sums to this total.",
            table(tables.categories(report)),
        ),
        section("Peak of each phase", "", table(tables.phase_peaks(report)), level=3),
        section(
            f"Live bytes {when}, by module",
            "The module that owns or allocated each storage, submodules included; identical layers share a row.",
            table(tables.modules(report.tree, shown.by_module, of_tree)),
        ),
        section(
            f"Live bytes {when}, by source line",
            "The innermost line outside torch and the standard library that allocated the storage; for allocations in "
            "backward, the line of the forward.",
            table(tables.parts("by_source", shown, rows or _ROWS)),
        ),
        section(
            f"Live bytes {when}, by allocating operator",
            "",
            table(tables.parts("by_op", shown, rows or _ROWS)),
        ),
        section(
            f"Treemap {when}",
            "Area: bytes by module. Color: the module's dominant category.",
            _hint("Click a box to zoom in."),
            _plot("treemap", "live bytes by module; the table by module above has the figures"),
        ),
        section(f"Largest storages {when}", "", table(tables.largest(report, rows or _LARGEST_ROWS))),
        *_saved(report, of_tree, rows or _ROWS),
        *_whole_job(report),
        section("Recording details", "", recording(report)),
        *commands(report, rank),
    ]
    return "\n".join(parts)


def _whole_job(report: Report) -> list[Html]:
    """Returns how full the devices were, and the host memory of the job's processes."""
    devices = [
        section(f"All of {use.device}", "At its fullest.", table(run_tables.device(use))) for use in report.devices
    ]
    host = {run_tables.host_parts: f"{report.host.headline}.", run_tables.host: "Peak of each."}
    shown = {title: table(build(report)) for build, title in host.items() if build(report)}
    return [*devices, *(section("Host memory", title, rows) for title, rows in shown.items())]


def _ranks(report: Report) -> list[Html]:
    if report.compared is None:
        return []
    found = peaks(report.compared, len(report.ranks), report.rank)
    return [section("Ranks", "Peak of each process of the job.", table(found))]


def _phases(rank: Rank) -> Html:
    shown = list(phase_colours(rank.history.phases).items())
    if rank.history.runs_again.any():
        shown.append((RECOMPUTED, RECOMPUTED_COLOUR))
    parts = [text("phases: ")]
    for phase, colour in shown:
        swatch = element("span", kind="swatch", style=f"background:{colour}")
        parts += [element("span", swatch, phase, kind="category phase"), text(" ")]
    return element("p", *parts, kind="about")


def _hint(sentence: str) -> Html:
    """Returns a hint shown on screen but not in print."""
    return element("p", sentence, kind="about hint")


def _plot(place: str, label: str) -> Html:
    plot = element("div", id=place, kind="plot", role="img", aria_label=label)
    return element("figure", plot, element("noscript", "The figure needs JavaScript; the tables do not."))


def _headline(report: Report) -> Html:
    peak, split = report.at_peak.moment, report.at_peak.by_category
    manifest = report.manifest
    target = name(shorten(manifest.target, 120)) if manifest.target else text("the job")
    rank = f" of rank {report.rank}" if report.ranks else ""
    verb = "is predicted to peak" if manifest.backend.name == PREDICTED else "peaks"
    facts = [
        _fact("peak", format_bytes(peak.allocated_bytes), f"{peak.allocated_bytes:,} B, step {peak.step}{rank}"),
        _fact("where", peak.phase, f"{peak.module_title or 'outside any module'}: {peak.op}"),
    ]
    if peak.source is not None:
        facts.append(_fact("line", peak.source.place, f"in {peak.source.function}" if peak.source.function else ""))
    if split.parts and split.total_bytes > 0:
        most = split.parts[0]
        share = format_percent(most.bytes / split.total_bytes)
        facts.append(_fact("largest category", fill_of(str(most.key)).label, f"{format_bytes(most.bytes)}, {share}"))
    facts += _room(report)
    facts.append(_fact("step time", format_us(report.step.duration_us), f"operator times: {manifest.op_times}"))
    warnings = [element("p", note.text, kind="warning") for note in report.notes if note.is_warning]
    machine = manifest.machine
    about = [
        machine.device_name or machine.device_kind,
        f"torch {manifest.torch_version}" if manifest.torch_version else "",
        f"under {report.plan}" if report.plan else "",
        date_of(manifest),
    ]
    return Html(
        element("h1", target, f" {verb} at {format_bytes(peak.allocated_bytes)}")
        + element("p", shorten(" · ".join(fact for fact in about if fact), 400), kind="soft")
        + "".join(warnings)
        + element("div", *facts, kind="facts")
    )


def _room(report: Report) -> list[Html]:
    """Returns the device's headroom above the peak, where there is a device."""
    if not has_device(report.manifest):
        return []
    capacity, peak = report.manifest.machine.capacity_bytes, report.at_peak.moment.allocated_bytes
    left = capacity - peak
    words = f"{format_bytes(left)} above the peak" if left >= 0 else f"peak is {format_bytes(-left)} over capacity"
    facts = [_fact("device memory", format_bytes(capacity), words)]
    if report.reserved_bytes is not None:
        unused = max(report.reserved_bytes - peak, 0)
        facts.append(_fact("reserved", format_bytes(report.reserved_bytes), f"{format_bytes(unused)} above the peak"))
    return facts


def _fact(label: str, value: str, detail: str) -> Html:
    parts = [element("span", label), element("strong", name(value, 60)), element("span", name(detail, 120))]
    return element("div", *parts, kind="fact")


def _saved(report: Report, tree_rows: int, rows: int) -> list[Html]:
    summary = report.saved_summary
    if not summary.by_module.parts:
        return []
    most = f"{format_bytes(summary.by_module.total_bytes)} during operator {summary.op_id:,}"
    saved = table(tables.modules(report.tree, summary.by_module, tree_rows))
    parts = [section("Saved for backward", f"Bytes saved by forward at their highest: {most}.", saved)]
    costs = run_tables.recompute(report, rows)
    if costs:
        about = "Bytes that checkpointing a module would free, and the time to recompute its forward; best first."
        parts.append(section("Recompute instead of saving", f"{about} Rows may be nested.", table(costs), level=3))
    return parts
