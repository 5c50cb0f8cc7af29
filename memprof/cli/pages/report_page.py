"""The page of `memprof report`: verdict, notes, tables and the next command; also those of --by rank and --leaks."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from memprof.analysis.allocator.allocator_report import fullest_rank
from memprof.analysis.allocator.device_verdict import NO_LIMIT
from memprof.analysis.host.host_processes import HostGrowth
from memprof.analysis.host.host_use import HostUse
from memprof.analysis.leaks.growth import Series, compare_series
from memprof.analysis.leaks.leak import describe_leak
from memprof.analysis.leaks.leak_tables import LEAKS, series_lines
from memprof.analysis.leaks.leaks import LeakReport, describe_leaks, find_leaks
from memprof.analysis.out_of_memory.out_of_memory_words import describe_post_mortem
from memprof.analysis.ranks import rank_tables
from memprof.analysis.ranks.rank_report import RankComparison
from memprof.analysis.ranks.rank_tables import peaks
from memprof.analysis.ranks.stragglers import Stragglers
from memprof.analysis.report import report_tables as tables
from memprof.analysis.report import run_tables
from memprof.analysis.report.notes import describe_steps, list_steps
from memprof.analysis.report.report import MomentSplit, Report
from memprof.analysis.report.run_tables import HOST_GROWTH
from memprof.analysis.table import FactTable, records
from memprof.cli.page import Page, show
from memprof.cli.pages.drawings import draw_timeline
from memprof.json_values import to_json
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.manifest import PREDICTED
from memprof.trace.schema import CATEGORY_LABELS
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_percent, format_us, printable

#: Ways to split live memory that have a table, by the value of ``--by``.
_SPLITS = {
    "op": "allocating operator",
    "source": "allocating source line",
    "stack": "allocation stack",
    "phase": "allocating phase",
    "metadata": "metadata",
}
_ROWS = 6
_TREE_ROWS = 12
_RANK_ROWS = 8
_ROWS_ALONE = 30


def fill_page(page: Page, report: Report, trace: str, table: str | None, top: int | None) -> None:
    """Adds a report to a page."""
    if report.growth:
        page.say(report.growth, "bold yellow")
    page.say(verdict(report), "bold")
    if report.post_mortem is not None:
        for line in describe_post_mortem(report.post_mortem):
            page.say(line, "" if line.startswith("  ") else "yellow")
    elif report.verdict.state != NO_LIMIT:
        page.say(f"{report.verdict.sentence}; {report.verdict.parts}.")
    if report.budget is not None:
        page.say(report.budget.describe())
    for note in report.notes:
        if note.is_warning and note.text != report.growth:
            page.warn(note.text)
    if report.at_moment is not None:
        page.say(_describe_shown(report, report.at_moment))
    if table is None:
        page.say(_facts(report), "dim")
        for drawn in draw_timeline(report.step, page.width) if page.is_terminal else ():
            page.add(drawn)
        _add_all(page, report, top)
        remarks = [note for note in report.notes if not note.is_warning]
        if remarks:
            page.add("")
        for note in remarks:
            page.say(f"note: {note.text}", "dim")
    else:
        _add_one(page, report, table, top or _ROWS_ALONE)
    page.add_next(*_next_commands(report, trace, table))


def verdict(report: Report) -> str:
    """Returns the report in one sentence: the peak, where it occurs, and its largest part."""
    peak = report.at_peak.moment
    whole, parts = report.at_peak.by_category.total_bytes, report.at_peak.by_category.parts
    share = ""
    if parts and whole > 0:
        name = CATEGORY_LABELS.get(str(parts[0].key), str(parts[0].key))
        share = f"; {100 * parts[0].bytes / whole:.0f} % {printable(name)}"
    rank = f" of rank {report.rank}" if report.ranks else ""
    size = format_bytes(peak.allocated_bytes)
    if not report.has_history:
        return f"{size} allocated when the snapshot was taken{rank}{share}"
    return f"peak {size} allocated in step {peak.step}{rank}, {printable(peak.describe())}{share}{_steps(report)}"


def _steps(report: Report) -> str:
    """Returns how the recorded steps differ; "" if they do not."""
    words = describe_steps(report.step_peaks)
    return f"; {words}" if words else ""


def _describe_shown(report: Report, split: MomentSplit) -> str:
    moment = split.moment
    peak = report.at_peak.moment.allocated_bytes
    share = f" ({format_percent(moment.allocated_bytes / peak)} of the peak)" if peak else ""
    size = format_bytes(moment.allocated_bytes)
    return f"shown: {size}{share} at operator {moment.op_id}, {printable(moment.describe())}"


def _facts(report: Report) -> str:
    manifest = report.manifest
    seen = [step for step in report.steps if step.peak is not None]
    recorded = [step.step for step in seen if step.kind == "recorded"] or [step.step for step in seen]
    is_predicted = manifest.backend.name == PREDICTED
    times = [
        f"step{'s' if len(recorded) > 1 else ''} {list_steps(recorded)} {PREDICTED if is_predicted else 'recorded'}",
        f"step time {format_us(report.step.duration_us)}",
        f"operator times: {manifest.op_times}",
    ]
    facts = [
        manifest.target.rsplit("/", 1)[-1],
        f"{'predicted ' if is_predicted else ''}under {report.plan}" if report.plan else "",
        f"torch {manifest.torch_version}" if manifest.torch_version else "",
        manifest.machine.device_name,
        *(times if report.has_history else ["no history of allocations"]),
    ]
    return printable(" | ".join(fact for fact in facts if fact))


def _add_all(page: Page, report: Report, top: int | None) -> None:
    rows, tree_rows = top or _ROWS, top or _TREE_ROWS
    shown = report.shown
    when = "then" if report.at_moment is not None else "at the peak" if report.has_history else "in the snapshot"
    if report.compared is not None:
        page.add_section("Ranks", peaks(report.compared, top or _RANK_ROWS, report.rank))
    moment = f"step {shown.moment.step}, operator {shown.moment.op_id} of {len(report.step.ops)}"
    moment = moment if report.has_history else ""
    page.add_section(f"Live bytes {when}, by category", tables.categories(report), moment)
    if report.has_history:
        page.add_section("Peak of each phase", tables.phase_peaks(report))
    page.add_section(
        f"Live bytes {when}, by module", tables.modules(report.tree, shown.by_module, tree_rows), "owner or allocator"
    )
    for name, title in (("by_op", "operator"), ("by_source", "source line")):
        page.add_section(f"Live bytes {when}, by {title}", tables.parts(name, shown, rows), "that allocated it")
    page.add_section(f"Largest storages {when}", tables.largest(report, rows))
    _add_saved(page, report, tree_rows)
    _add_recompute(page, report, rows)
    is_dry = report.manifest.backend.name == DRY_RUN
    origin = "as a driver would report; the context is an estimate" if is_dry else "as reported by the driver"
    for use in report.devices:
        page.add_section(f"All of {use.device}", run_tables.device(use), f"at its peak, {origin}")
    if report.forecast is not None:
        page.add_section("Host memory to expect", run_tables.host_forecast(report), report.forecast.headline)
        return
    page.add_section("Host memory at its fullest", run_tables.host_parts(report), report.host.headline)
    page.add_section("Host memory by process", run_tables.host(report), "peak of each over the whole job")


def _add_one(page: Page, report: Report, table: str, rows: int) -> None:
    shown = report.shown
    when = "at the peak" if report.at_moment is None else f"at operator {shown.moment.op_id}"
    if table == "category":
        page.add_section(f"Live bytes {when}, by category", tables.categories(report))
    elif table == "module":
        page.add_section(f"Live bytes {when}, by module", tables.modules(report.tree, shown.by_module, rows))
        _add_saved(page, report, rows)
        _add_recompute(page, report, rows)
    elif table in _SPLITS:
        limit = None if table == "phase" else rows
        page.add_section(f"Live bytes {when}, by {_SPLITS[table]}", tables.parts(f"by_{table}", shown, limit))
        if table == "phase":
            page.add_section("Peak of each phase", tables.phase_peaks(report))
    else:
        page.add_section(f"Largest storages alive {when}", tables.largest(report, rows))


def _add_saved(page: Page, report: Report, rows: int) -> None:
    summary = report.saved_summary
    when = "at its peak" if report.at_moment is None else "then"
    remark = f"{format_bytes(summary.by_module.total_bytes)} {when}, operator {summary.op_id}"
    page.add_section("Saved for backward", tables.modules(report.tree, summary.by_module, rows), remark)


def _add_recompute(page: Page, report: Report, rows: int) -> None:
    table = run_tables.recompute(report, rows)
    remarks = ["best first; rows may be nested"] if table else []
    if report.recomputed_us:
        remarks.append(f"{format_us(report.recomputed_us)} of it in the step already")
    page.add_section("Recompute instead of saving", table, "; ".join(remarks), even_if_empty=bool(remarks))


def _next_commands(report: Report, trace: str, table: str | None) -> list[tuple[str, str]]:
    command = f"memprof report {shlex.quote(trace)}"
    others = [moment for moment in report.phase_peaks if moment.op_id != report.at_peak.moment.op_id]
    other = max(others, key=lambda moment: moment.allocated_bytes, default=report.at_peak.moment)
    if report.at_moment is not None:
        return [(f"{command} --step {report.step.number}", "the peak of this step")]
    if table is None:
        further = (f"{command} --at {other.step}:{other.op_id}", "what is alive at another moment")
        return [
            *([(f"{command} --leaks", "all lines whose tensors stay")] if report.growth else []),
            *([(f"{command} --by rank", "spread between ranks")] if report.ranks else []),
            (f"{command} --by module", "each layer")
            if len(report.step.modules)
            else (f"{command} --by stack", "the allocation stacks"),
            further if report.has_history else (f"{command} --allocator", "the segments, and what is free in them"),
        ]
    if table == "storage":
        return [(f"{command} --by stack", "the allocation stacks")]
    return [(f"{command} --by storage", "the largest storages")]


_COMPARED_ROWS = 12
_LEAK_ROWS = 10
#: Version of the JSON's keys.
LEAKS_SCHEMA = 1


def fill_rank_page(
    page: Page, compared: RankComparison, found: Stragglers, notes: tuple[str, ...], trace: str, top: int | None
) -> None:
    """Adds the comparison of ranks to a page."""
    rows = top or _COMPARED_ROWS
    page.say(describe_ranks(compared), "bold")
    page.warn(*notes)
    page.add_section("Ranks", rank_tables.peaks(compared, max(rows, 2)), "each at the peak of its own highest step")
    page.add_section("Spread by phase", rank_tables.spreads(compared.phases, "phase", rows), "peaks")
    page.add_section("Spread by category", rank_tables.spreads(compared.categories, "category", rows), "at the peaks")
    page.add_section("Spread by module", rank_tables.spreads(compared.modules, "module", rows), "owner or allocator")
    clocks = found.describe_clocks() or "recorded steps"
    page.add_section("Stragglers at collectives", rank_tables.stragglers(found, rows), clocks)
    page.add_section("Longest waits at collectives", rank_tables.late_collectives(found, min(rows, 6)))
    if compared.worst is not None:
        page.add_next((f"memprof report {shlex.quote(trace)} --rank {compared.worst}", "what fills the worst rank"))


def describe_ranks(compared: RankComparison) -> str:
    """Returns the worst rank and the spread between ranks in one sentence."""
    whole = compared.peak
    if whole is None:
        return f"None of {len(compared.ranks)} ranks ran an operator while it was recorded."
    worst = next(one for one in compared.ranks if one.rank == compared.worst)
    on = f" on {printable(worst.node)}" if len({one.node for one in compared.ranks}) > 1 and worst.node else ""
    where = f"{worst.phase}{f' of {printable(worst.module)}' if worst.module else ''} ({printable(worst.op)})"
    if len(compared.ranks) < 2:
        return f"rank {worst.rank}{on} peaks at {format_bytes(whole.most)}, {where}"
    if not whole.bytes:
        return f"all {len(compared.ranks):,} ranks peak at {format_bytes(whole.most)}, rank {worst.rank}{on} in {where}"
    return (
        f"rank {worst.rank}{on} is worst of {len(compared.ranks):,}: peak {format_bytes(whole.most)} in {where}, "
        f"{format_percent(whole.imbalance)} above the median; rank {whole.least_rank} is lowest with "
        f"{format_bytes(whole.least)}"
    )


def show_leaks(traces: Sequence[Trace], rank: int | None, top: int | None, *, is_json: bool) -> None:
    """Prints what grows.

    Args:
        traces: One recording, or several of one job in their order.
        rank: The rank; None for the one with the highest peak.
        top: Maximum rows; None for the default.
        is_json: Print JSON instead.
    """
    chosen = [_of_rank(trace, rank) for trace in traces]
    rows = top or _LEAK_ROWS
    found = compare_series(chosen) if len(chosen) > 1 else find_leaks(chosen[0])
    more = {"is_growing": found.is_growing} if isinstance(found, Series) else {}
    host = HostUse.of(chosen[0] if rank is not None else traces[0]).growth if len(chosen) == 1 else ()
    show(
        lambda page: _fill_series(page, found, rows) if isinstance(found, Series) else _fill(page, found, host, rows),
        lambda: {"schema": LEAKS_SCHEMA, **more, **to_json(found), "host_growth": records(HOST_GROWTH, host)},
        is_json=is_json,
    )


def _of_rank(trace: Trace, rank: int | None) -> Trace:
    if len(trace.ranks) == 1:
        return trace.rank_trace(trace.ranks[0])
    return trace.rank_trace(fullest_rank(trace) if rank is None else rank)


def _fill(page: Page, report: LeakReport, host: Sequence[HostGrowth], rows: int) -> None:
    page.say(describe_leaks(report), "bold")
    if report.growth.bytes_per_step == 0 and report.growth.how == "storages":
        page.say("What is kept less often, such as once an epoch, shows over a whole run: `memprof record --light`.")
    for growth in host:
        page.say(growth.describe())
    if not report.leaks:
        return
    page.say(describe_leak(report.leaks[0]))
    page.add(FactTable(LEAKS, report.leaks[:rows]))


def _fill_series(page: Page, series: Series, rows: int) -> None:
    ends = ", ".join(format_bytes(size) for size in series.bytes)
    verdict = "grows from each recording to the next" if series.is_growing else "does not grow throughout"
    page.say(f"Memory in use at the end {verdict}: {ends}.", "bold")
    if series.lines:
        page.add(series_lines(series, rows))
