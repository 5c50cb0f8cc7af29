"""The report, and the post-mortem in it, as JSON containers: stable keys, numbers of bytes and microseconds."""

from __future__ import annotations

from memprof.analysis.host.host_forecast import HostForecast
from memprof.analysis.out_of_memory.post_mortem import PostMortem
from memprof.analysis.ranks.rank_tables import RANKS, spreads_to_json
from memprof.analysis.report import report_tables as tables
from memprof.analysis.report import run_tables
from memprof.analysis.report.report import MomentSplit, Report
from memprof.analysis.report.table_rows import find_largest
from memprof.analysis.report.whole_loop import LOOP_MOMENTS
from memprof.analysis.report.whole_run import later_rise
from memprof.analysis.table import record, records
from memprof.json_values import Json, number, to_json
from memprof.policies.plan.plan_tables import policy_tables

#: Schema version; incremented when a key changes meaning or is removed.
REPORT_SCHEMA = 1


def report_to_json(report: Report, largest: int) -> Json:
    """Returns a report ready for ``json.dump``.

    Args:
        report: The report; its layers must not be folded.
        largest: Number of largest storages to list.
    """
    manifest, step = report.manifest, report.step
    result = {
        "schema": REPORT_SCHEMA,
        "memprof_version": manifest.memprof_version,
        "torch_version": manifest.torch_version,
        "target": manifest.target,
        "command": list(manifest.command),
        "machine": manifest.machine.to_json(),
        "complete": manifest.capture.is_complete,
        "out_of_memory": None if report.post_mortem is None else post_mortem_to_json(report.post_mortem),
        "capture": manifest.capture.to_json(),
        "backend": manifest.backend.to_json(),
        "op_times": manifest.op_times,
        "plan": policy_tables(manifest.plan) or None,
        "notes": [note.text for note in report.notes],
        "rank": report.rank,
        "step": step.number,
        "step_time_us": number(step.duration_us),
        "steps": records(run_tables.STEPS, report.steps),
        **({} if report.run is None else {"run": report.run}),
        "later_peak": manifest.later.to_json() if later_rise(manifest.later, report.step_peaks) else None,
        "budget": None if report.budget is None else report.budget.to_json(),
        **({"moments": records(LOOP_MOMENTS, report.moments)} if report.moments else {}),
        "peak": {**record(tables.MOMENTS, report.at_peak.moment), "reserved_bytes": report.reserved_bytes},
        "at_peak": _split(report, report.at_peak, largest),
        "phases": {moment.phase: record(tables.MOMENTS, moment) for moment in report.phase_peaks},
        "categories": {
            one.category: record(tables.CATEGORIES, one) for one in tables.category_rows(report) if one.maximum
        },
        "saved": _saved(report),
        "recompute": records(run_tables.RECOMPUTE, report.recompute),
        "recomputed_us": number(report.recomputed_us),
        "host": records(run_tables.HOST, report.host.processes),
        "host_use": {
            "peak_bytes": report.host.total_bytes if report.host.fullest else None,
            "parts": records(run_tables.HOST_PARTS, report.host.fullest),
            "limits": records(run_tables.HOST_LIMITS, report.host.limits),
            "growth": records(run_tables.HOST_GROWTH, report.host.growth),
            "forecast": None if report.forecast is None else _forecast(report.forecast),
        },
        "devices": [{**to_json(use), "used_bytes": use.used_bytes} for use in report.devices],
    }
    if report.at_moment is not None:
        result["moment"] = record(tables.MOMENTS, report.at_moment.moment)
        result["at_moment"] = _split(report, report.at_moment, largest)
    if report.compared is not None:
        result["ranks"] = records(RANKS, report.ranks)
        result["worst_rank"] = report.compared.worst
        result |= spreads_to_json(report.compared)
    return result


def _split(report: Report, split: MomentSplit, largest: int) -> Json:
    """Returns live memory at a moment; the rows of every list but ``largest_storages`` sum to the whole."""
    return {
        "allocated_bytes": split.moment.allocated_bytes,
        "by_category": {str(part.key): part.bytes for part in split.by_category.parts},
        "category_sources": split.category_sources,
        "by_module": records(tables.MODULES, tables.module_rows(report.tree, split.by_module)),
        **{name: records(columns, getattr(split, name).parts) for name, columns in tables.SPLITS.items()},
        "largest_storages": records(tables.LARGEST, find_largest(split.holding, report.sources, largest)),
    }


def _forecast(forecast: HostForecast) -> Json:
    least, most = forecast.bounds
    return {
        "least_bytes": least,
        "most_bytes": most,
        "free_bytes": forecast.free_bytes,
        "margin_bytes": forecast.margin_bytes,
        "parts": records(run_tables.HOST_FORECAST, forecast.parts),
    }


def _saved(report: Report) -> Json:
    summary = report.saved_summary
    return {
        "op_id": summary.op_id,
        "total_bytes": summary.by_module.total_bytes,
        "storages": summary.storages,
        "by_module": records(tables.MODULES, tables.module_rows(report.tree, summary.by_module)),
    }


def post_mortem_to_json(found: PostMortem) -> Json:
    """Returns a post-mortem ready for ``json.dump``."""
    held = found.held
    return {
        "rank": found.rank,
        "failures": found.failures,
        "caught": found.is_caught,
        "device": found.device,
        "step": found.step,
        "phase": found.phase or None,
        "op": found.op or None,
        "module": found.module,
        "source": None if found.source is None else found.source.place,
        "message": found.message,
        "requested_bytes": found.requested_bytes,
        "allocated_bytes": found.allocated_bytes,
        "reserved_bytes": found.reserved_bytes,
        "cached_bytes": found.cached_bytes,
        "largest_free_bytes": found.largest_free_bytes,
        "free_bytes": found.free_bytes,
        "total_bytes": found.total_bytes,
        "fragmented": found.is_fragmented,
        "room": None
        if found.room is None
        else {**to_json(found.room), "is_fragmented": found.room.is_fragmented, "short_bytes": found.room.short_bytes},
        "held": None
        if held is None
        else {
            "bytes": held.total_bytes,
            "by_category": {str(part.key): part.bytes for part in held.by_category.parts},
            "by_module": [
                {"module": None if part.key is None else held.tree.title(part.key), "bytes": part.bytes}
                for part in held.by_module.parts
            ],
            "by_line": [
                {"line": None if part.key is None else part.key.place, "bytes": part.bytes}
                for part in held.by_source.parts
            ],
            "largest": [
                {
                    "bytes": one.allocated_bytes,
                    "category": one.category,
                    "name": one.name or None,
                    "shape": one.shape or None,
                    "module": one.module,
                    "source": None if one.source is None else one.source.place,
                }
                for one in held.largest
            ],
        },
        "gradients_missing_bytes": found.gradients_missing_bytes,
        "optimizers": [{**to_json(each), "missing_bytes": each.missing_bytes} for each in found.optimizers],
        "has_whole_step": found.has_whole_step,
    }
