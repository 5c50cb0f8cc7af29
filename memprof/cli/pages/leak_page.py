"""The page of `memprof report --leaks`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from memprof.analysis.allocator.allocator_report import fullest_rank
from memprof.analysis.leaks.growth import Series, compare_series, describe_growth
from memprof.analysis.leaks.leak import Leak, describe_holder, describe_leak, describe_rate
from memprof.analysis.leaks.leaks import LeakReport, find_leaks
from memprof.cli.page import Page, cell, make_table
from memprof.json_values import to_json
from memprof.trace.store import Trace
from memprof.units import format_bytes

_ROWS = 10
#: Version of the JSON's keys.
LEAKS_SCHEMA = 1


def show_leaks(traces: Sequence[Trace], rank: int | None, top: int | None, *, is_json: bool) -> None:
    """Prints what grows.

    Args:
        traces: One recording, or several of one job in their order.
        rank: The rank; None for the one with the highest peak.
        top: Maximum rows; None for the default.
        is_json: Print JSON instead.
    """
    chosen = [_of_rank(trace, rank) for trace in traces]
    page = Page.for_stdout()
    if len(chosen) > 1:
        series = compare_series(chosen)
        record = {"schema": LEAKS_SCHEMA, "is_growing": series.is_growing, **to_json(series)}
        _fill_series(page, series, top or _ROWS)
    else:
        report = find_leaks(chosen[0])
        record = {"schema": LEAKS_SCHEMA, **to_json(report)}
        _fill(page, report, top or _ROWS)
    if is_json:
        print(json.dumps(record, indent=2, allow_nan=False))
    else:
        page.write()


def _of_rank(trace: Trace, rank: int | None) -> Trace:
    if len(trace.ranks) == 1:
        return trace.rank_trace(trace.ranks[0])
    return trace.rank_trace(fullest_rank(trace) if rank is None else rank)


def _fill(page: Page, report: LeakReport, rows: int) -> None:
    page.add(Text(describe_growth(report.growth), style="bold"))
    if not report.leaks:
        return
    page.add(Text(describe_leak(report.leaks[0])))
    table = make_table(">per step", ">kept", ">tensors", ">since step", "made at", "held by")
    for leak in report.leaks[:rows]:
        table.add_row(*_row(leak))
    page.add(table)


def _row(leak: Leak) -> list[Text]:
    made = leak.line or leak.op or f"{leak.shape} {leak.dtype}".strip() or "another thread, or C++"
    return [
        cell(describe_rate(leak).removesuffix(" a step")),
        cell(format_bytes(leak.kept_bytes)),
        cell(f"{leak.tensors:,}"),
        cell("" if leak.since_step is None else str(leak.since_step)),
        cell(made),
        cell("unknown" if leak.held_by is None else describe_holder(leak.held_by)),
    ]


def _fill_series(page: Page, series: Series, rows: int) -> None:
    ends = ", ".join(format_bytes(size) for size in series.bytes)
    verdict = "grows from each recording to the next" if series.is_growing else "does not grow throughout"
    page.add(Text(f"Memory in use at the end {verdict}: {ends}.", style="bold"))
    if not series.lines:
        return
    table: Table = make_table(*(f">{name}" for name in series.names), "allocated at")
    for one in series.lines[:rows]:
        place = one.line or "(before the recording)"
        table.add_row(*(cell(format_bytes(size)) for size in one.bytes), cell(place))
    page.add(table)
