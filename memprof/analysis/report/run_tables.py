"""The tables of a report on the whole job: recompute, devices, host memory and steps."""

from __future__ import annotations

import math
from operator import attrgetter

from memprof.analysis.host.host_processes import HostProcess, count_of
from memprof.analysis.report.report import Report
from memprof.analysis.report.report_tables import times
from memprof.analysis.report.whole_run import DeviceUse
from memprof.analysis.table import (
    BYTES,
    COUNT,
    FIGURE,
    NAME,
    NUMBER,
    SHARE,
    TEXT,
    TRUTH,
    US,
    WORDS,
    Column,
    FactTable,
    Read,
    shown,
    sized_parts,
)

#: Modules that would free less than this share of the saved tensors are left out of the table.
_WORTH_A_ROW = 0.01

RECOMPUTE = (
    Column("module", None),
    Column("type", None),
    shown("module", NAME, lambda cost: " ".join([cost.module or cost.type, *times(cost.count)]), key="name"),
    Column("freed_bytes", "frees", BYTES),
    Column("time_us", "recompute", US, meaning="time to repeat its forward"),
    shown("of step", SHARE, lambda cost: cost.time_us if math.isfinite(cost.bytes_per_us) else None),
    Column("flops", None, COUNT),
    shown("work", FIGURE, lambda cost: _format_flops(cost.flops)),
    shown("frees per us", BYTES, lambda cost: cost.bytes_per_us if math.isfinite(cost.bytes_per_us) else None),
)


def recompute(report: Report, limit: int) -> FactTable:
    """Returns each module's recompute time and the bytes it would free, best ratio first."""
    worth = _WORTH_A_ROW * report.saved_summary.by_module.total_bytes
    costs = [cost for cost in report.recompute if cost.freed_bytes >= worth]
    return FactTable(RECOMPUTE, costs[:limit], report.step.duration_us)


def device(use: DeviceUse) -> FactTable:
    """Returns how the memory of a whole device is divided; the rows sum to its capacity."""
    held = {"torch's allocator in this process (reserved)": use.reserved_bytes}
    if use.own_bytes is None:
        held["CUDA context, NCCL, libraries and other processes"] = use.other_bytes
    else:
        held |= {"CUDA context, NCCL and libraries in this process": use.own_bytes, "other processes": use.other_bytes}
    table = sized_parts("held by", held | {"free": use.free_bytes}, use.total_bytes)
    if use.pinned_bytes:
        table.add("rest", part="in addition, pinned host memory", bytes=use.pinned_bytes)
    return table


HOST = (
    Column("role", "process"),
    Column("pid", None, NUMBER),
    Column("maximum_rss_bytes", "resident", BYTES),
    Column("maximum_private_bytes", "private", BYTES, meaning="resident memory not shared with other processes"),
)


def host(report: Report) -> FactTable:
    """Returns the host memory of the job's processes; processes of one role share a row, of the largest."""
    roles: dict[str, list[HostProcess]] = {}
    for process in report.host.processes:
        roles.setdefault(process.role, []).append(process)
    rows = []
    for role, found in roles.items():
        private = [one.maximum_private_bytes for one in found if one.maximum_private_bytes is not None]
        name = role if len(found) == 1 else f"{count_of(role, len(found))}, largest"
        rows.append(HostProcess(name, 0, max(one.maximum_rss_bytes for one in found), max(private, default=None)))
    return FactTable(HOST, rows)


HOST_PARTS = (
    Column("name", "host memory", TEXT),
    Column("bytes", "bytes", BYTES),
)
HOST_FORECAST = (
    Column("name", "host memory", TEXT),
    Column("least_bytes", "at least", BYTES),
    Column("most_bytes", "at most", BYTES),
    Column("basis", "from", WORDS),
)
HOST_LIMITS = (
    Column("name", "limit", TEXT),
    Column("used_bytes", "in use", BYTES, meaning="by all processes"),
    Column("total_bytes", "of", BYTES),
)
HOST_GROWTH = (
    Column("role", "process"),
    Column("processes", "processes", NUMBER),
    Column("first_bytes", "from", BYTES, meaning="once it had settled"),
    Column("last_bytes", "to", BYTES),
    Column("seconds", "seconds", FIGURE),
    Column("cause", "cause", TEXT),
)


def host_parts(report: Report) -> FactTable:
    """Returns what the host memory of all processes was divided into at its fullest."""
    return FactTable(HOST_PARTS, report.host.fullest, report.host.total_bytes)


def host_forecast(report: Report) -> FactTable:
    """Returns the host memory that a dry-run job will take."""
    return FactTable(HOST_FORECAST, () if report.forecast is None else report.forecast.parts)


def _at_peak(name: str) -> Read:
    return lambda one: None if one.peak is None else getattr(one.peak, name)


STEPS = (
    Column("step", "step", NUMBER),
    Column("kind", None),
    shown(
        "kind", TEXT, lambda one: one.kind.replace("_", " ") + ("" if one.is_complete else ", incomplete"), key="how"
    ),
    Column("complete", None, TRUTH, attrgetter("is_complete")),
    Column("duration_us", "time", US),
    Column("peak_allocated_bytes", "peak", BYTES, _at_peak("allocated_bytes")),
    Column("peak_phase", "phase", TEXT, _at_peak("phase")),
    Column("peak_op_id", None, NUMBER, _at_peak("op_id")),
)


def steps(report: Report) -> FactTable:
    """Returns every step seen."""
    return FactTable(STEPS, report.steps)


def _format_flops(flops: int) -> str:
    if not flops:
        return ""
    power = min(int(math.log10(flops) // 3), 5)
    return f"{flops / 1000**power:.1f} {('', 'k', 'M', 'G', 'T', 'P')[power]}flop"
