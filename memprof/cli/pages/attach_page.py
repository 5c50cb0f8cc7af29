"""The pages of `memprof attach`: what is alive in a job, and the processes that have torch loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from memprof.analysis.report import report_tables, run_tables
from memprof.analysis.report.report import Report, build_report
from memprof.analysis.report.table_rows import find_largest
from memprof.analysis.table import BYTES, COUNT, NUMBER, SHARE, TEXT, Column, FactTable, records, shown
from memprof.cli.page import Page
from memprof.launch.attach.dump import Dump
from memprof.launch.attach.processes import JobProcess
from memprof.trace.schema import NONE, DeviceMemory, Memory, Storages
from memprof.trace.secrets import mask_words
from memprof.trace.store import Trace
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
    Column("command", "command", TEXT, lambda one: " ".join(mask_words(one.command))),
)


def by_dtype(report: Report) -> list[tuple[str | None, int, int]]:
    """Returns element types with their live bytes and storages, those of most bytes first."""
    storages = report.step.storages
    sizes, counts = Counter[str](), Counter[str]()
    for dtype, size in zip(storages.dtype.tolist(), storages.allocated_bytes.tolist(), strict=True):
        sizes[dtype] += size
        counts[dtype] += 1
    return [(dtype or None, size, counts[dtype]) for dtype, size in sizes.most_common()]


def dtypes(report: Report) -> FactTable:
    """Returns the live bytes by element type."""
    rows = by_dtype(report)
    return FactTable(DTYPES, rows, sum(size for _, size, _ in rows))


def fill_dump(page: Page, dumps: Sequence[Dump], rows: int | None) -> None:
    """Adds what is alive in the processes of a job to a page."""
    for dump in dumps:
        if dump is not dumps[0]:
            page.say("")
        _fill_one(page, dump, rows, f"process {dump.pid}{f', rank {dump.rank}' if len(dumps) > 1 else ''}")


def _fill_one(page: Page, dump: Dump, rows: int | None, who: str) -> None:
    reports = [build_report(trace) for trace in dump.traces]
    first, machine = reports[0], dump.traces[0].manifest.machine
    total = format_bytes(first.shown.by_category.total_bytes)
    page.say(f"{total} of tensors on {machine.device_name or machine.device_kind} in {who}", "bold")
    for sentence in _facts(dump, first):
        page.say(sentence)
    page.add_section("Alive now, by category", _without(report_tables.categories(first), "maximum_bytes", "op_id"))
    page.add_section(
        "By module", report_tables.modules(first.tree, first.shown.by_module, rows or _TREE_ROWS), "that owns it"
    )
    page.add_section("By dtype", dtypes(first))
    page.add_section("Largest", _without(report_tables.largest(first, rows or _ROWS), "source", "age_ops"))
    for use in first.devices:
        page.add_section(f"All of {use.device}", run_tables.device(use), "as reported by the driver")
    for trace, other in zip(dump.traces[1:], reports[1:], strict=True):
        title = f"On {trace.table(Storages).device[0]}, by category"
        page.add_section(title, _without(report_tables.categories(other), "maximum_bytes", "op_id"))
    page.add("")
    page.say(f"The job was held up for {dump.pause_s * 1e3:.0f} ms.", "dim")


def _without(table: FactTable, *keys: str) -> FactTable:
    """Returns a table without columns that say when: nothing is known of that."""
    places = [place for place, column in enumerate(table.columns) if column.key not in keys]
    table.columns = tuple(table.columns[place] for place in places)
    table.rows = [replace(row, cells=tuple(row.cells[place] for place in places)) for row in table.rows]
    return table


def _facts(dump: Dump, report: Report) -> list[str]:
    """Returns how full the device and the host are, and what the segments lose to fragmentation."""
    trace, host, found = dump.traces[0], dump.host, []
    capacity, reserved = trace.manifest.machine.capacity_bytes, report.reserved_bytes
    if reserved is not None:
        live = report.shown.by_category.total_bytes
        found.append(
            f"{format_bytes(reserved)} reserved, {format_bytes(reserved - live)} of it free inside segments; the "
            f"device has {format_bytes(capacity)}, {format_bytes(capacity - reserved)} more than that."
        )
    rss = int(trace.table(Memory).host_rss_bytes[0])
    if rss != NONE:
        room = "" if host is None else f"; {format_bytes(host.free_bytes)} of {format_bytes(host.total_bytes)} left"
        found.append(f"{format_bytes(rss)} resident in main memory{room}.")
    pinned = trace.table(DeviceMemory).pinned_bytes
    if len(pinned) and pinned[-1] > 0:
        found.append(f"{format_bytes(int(pinned[-1]))} of host memory pinned by torch.")
    return found


def dump_json(dumps: Sequence[Dump], rows: int | None) -> dict[str, Any]:
    """Returns what is alive in the processes of a job as JSON containers."""
    return {"schema": 1, "processes": [_one_json(dump, rows) for dump in dumps]}


def _one_json(dump: Dump, rows: int | None) -> dict[str, Any]:
    devices = [_device_json(trace, rows) for trace in dump.traces]
    host = None if dump.host is None else asdict(dump.host)
    return {"pid": dump.pid, "rank": dump.rank, "pause_us": dump.pause_s * 1e6, "host": host, "devices": devices}


def _device_json(trace: Trace, rows: int | None) -> dict[str, Any]:
    report, memory = build_report(trace), trace.table(Memory)
    modules = report_tables.module_rows(report.tree, report.shown.by_module)
    largest = find_largest(report.shown.holding, report.sources, rows or _ROWS)
    return {
        "device": str(memory.device[0]),
        "allocated_bytes": report.shown.by_category.total_bytes,
        "reserved_bytes": report.reserved_bytes,
        "capacity_bytes": trace.manifest.machine.capacity_bytes,
        "host_rss_bytes": int(memory.host_rss_bytes[0]),
        "storages": len(trace.table(Storages)),
        "by_category": [{"category": one.category, "bytes": one.bytes} for one in report_tables.category_rows(report)],
        "by_module": [
            {
                "module": one.of_node(one.tree.names),
                "type": one.of_node(one.tree.types),
                "bytes": one.row.own_bytes,
                "storages": one.storages,
            }
            for one in modules
        ],
        "by_dtype": records(DTYPES, by_dtype(report)),
        "largest": [
            {
                "bytes": one.allocated_bytes,
                "category": one.category,
                "name": one.name or None,
                "module": one.module,
                "shape": one.shape,
                "dtype": one.dtype,
            }
            for one in largest
        ],
    }


def fill_list(page: Page, found: Sequence[JobProcess]) -> None:
    """Adds the processes that have torch loaded to a page."""
    if not found:
        page.say("no process of this user has torch loaded")
    page.add_section("Processes with torch", FactTable(PROCESSES, list(found)))


def list_json(found: Sequence[JobProcess]) -> dict[str, Any]:
    """Returns them as JSON containers."""
    return {"schema": 1, "processes": records(PROCESSES, found)}
