"""The pages of `memprof attach`: what is alive in a job, and the processes that have torch loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from memprof.analysis.report import report_tables, run_tables
from memprof.analysis.report.report import Report, build_report
from memprof.analysis.table import BYTES, COUNT, NUMBER, SHARE, TEXT, Column, FactTable, records, shown
from memprof.cli.page import Page
from memprof.launch.attach.dump import Dump
from memprof.launch.attach.processes import JobProcess
from memprof.trace.schema import Storages
from memprof.units import format_bytes

_ROWS, _TREE_ROWS = 10, 16
DTYPES = (
    Column("dtype", "dtype", TEXT, lambda one: one[0], missing="(unknown)"),
    Column("bytes", "bytes", BYTES, lambda one: one[1]),
    shown("share", SHARE, lambda one: one[1]),
    Column("storages", "storages", COUNT, lambda one: one[2]),
)
PROCESSES = (
    Column("pid", "pid", NUMBER),
    Column("device_bytes", "device memory", BYTES),
    Column("rss_bytes", "resident", BYTES),
    Column("python", "python", TEXT, lambda one: ".".join(map(str, one.python))),
    Column("command", "command", TEXT, lambda one: " ".join(one.command)),
)


def dtypes(report: Report) -> FactTable:
    """Returns the live bytes by element type."""
    storages = report.step.storages
    sizes, counts = Counter[str](), Counter[str]()
    for dtype, size in zip(storages.dtype.tolist(), storages.allocated_bytes.tolist(), strict=True):
        sizes[dtype] += size
        counts[dtype] += 1
    rows = [(dtype or None, size, counts[dtype]) for dtype, size in sizes.most_common()]
    return FactTable(DTYPES, rows, sum(sizes.values()))


def fill_dump(page: Page, dump: Dump, rows: int | None) -> None:
    """Adds what is alive in a job to a page."""
    first = build_report(dump.traces[0])
    memory = dump.traces[0].manifest.machine
    total = first.shown.by_category.total_bytes
    page.say(f"{format_bytes(total)} alive on {memory.device_name or memory.device_kind} in process {dump.pid}", "bold")
    for note in _facts(first):
        page.say(note)
    page.add_section("Alive now, by category", report_tables.categories(first))
    page.add_section("By module", report_tables.modules(first.tree, first.shown.by_module, rows or _TREE_ROWS), "owner")
    page.add_section("By dtype", dtypes(first))
    page.add_section("Largest", report_tables.largest(first, rows or _ROWS))
    for use in first.devices:
        page.add_section(f"All of {use.device}", run_tables.device(use), "as reported by the driver")
    for trace in dump.traces[1:]:
        other = build_report(trace)
        page.add_section(f"On {trace.table(Storages).device[0]}", report_tables.categories(other))
    page.say(f"The job was held up for {dump.pause_s * 1e3:.0f} ms.", "dim")


def _records(table: FactTable) -> list[Any]:
    return records(table.columns, table.items)


def _facts(report: Report) -> list[str]:
    return [str(note.text) for note in report.notes]


def attach_json(dump: Dump, rows: int | None) -> dict[str, Any]:
    """Returns the same as JSON containers."""
    devices = []
    for trace in dump.traces:
        report = build_report(trace)
        devices.append(
            {
                "device": str(trace.table(Storages).device[0]) if len(trace.table(Storages)) else "cpu",
                "allocated_bytes": report.shown.by_category.total_bytes,
                "reserved_bytes": report.reserved_bytes,
                "capacity_bytes": trace.manifest.machine.capacity_bytes,
                "by_category": _records(report_tables.categories(report)),
                "by_module": records(
                    report_tables.MODULES, report_tables.module_rows(report.tree, report.shown.by_module)
                ),
                "by_dtype": _records(dtypes(report)),
                "largest": _records(report_tables.largest(report, rows or _ROWS)),
            }
        )
    return {"pid": dump.pid, "pause_us": dump.pause_s * 1e6, "devices": devices}


def fill_list(page: Page, found: Sequence[JobProcess]) -> None:
    """Adds the processes that have torch loaded to a page."""
    if not found:
        page.say("no process of this user has torch loaded")
    page.add_section("Processes with torch", FactTable(PROCESSES, list(found)))


def list_json(found: Sequence[JobProcess]) -> list[dict[str, Any]]:
    """Returns them as JSON containers."""
    return records(PROCESSES, found)
