"""The report, and the post-mortem in it, as JSON containers: stable keys, numbers of bytes and microseconds."""

from __future__ import annotations

import numpy as np

from memprof.analysis.out_of_memory.post_mortem import PostMortem
from memprof.analysis.ranks.ranks_json import spreads_to_json
from memprof.analysis.report.breakdown import Breakdown
from memprof.analysis.report.module_tree import ModuleTree
from memprof.analysis.report.report import MomentSplit, RankSummary, Report
from memprof.analysis.report.sources import source_to_json
from memprof.analysis.report.table_rows import bytes_by_node, find_largest
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
        "steps": [
            {
                "step": one.step,
                "kind": one.kind,
                "complete": one.is_complete,
                "duration_us": number(one.duration_us),
                "peak_allocated_bytes": one.peak.allocated_bytes if one.peak else None,
                "peak_phase": one.peak.phase if one.peak else None,
                "peak_op_id": one.peak.op_id if one.peak else None,
            }
            for one in report.steps
        ],
        **({} if report.run is None else {"run": report.run}),
        "peak": {**to_json(report.at_peak.moment), "reserved_bytes": report.reserved_bytes},
        "at_peak": _split(report, report.at_peak, largest),
        "phases": {moment.phase: to_json(moment) for moment in report.phase_peaks},
        "categories": to_json(report.category_maxima),
        "saved": _saved(report),
        "recompute": [
            {"module": report.tree.names[cost.node], "type": report.tree.types[cost.node], **to_json(cost)}
            for cost in report.recompute
        ],
        "recomputed_us": number(report.recomputed_us),
        "host": to_json(report.host),
        "devices": [{**to_json(use), "used_bytes": use.used_bytes} for use in report.devices],
    }
    if report.at_moment is not None:
        result["moment"] = to_json(report.at_moment.moment)
        result["at_moment"] = _split(report, report.at_moment, largest)
    if report.ranks:
        result["ranks"] = [_rank(one) for one in report.ranks]
        result["worst_rank"] = report.worst_rank
    if report.compared is not None:
        result |= spreads_to_json(report.compared)
    return result


def _split(report: Report, split: MomentSplit, largest: int) -> Json:
    """Returns live memory at a moment; the rows of every list but ``largest_storages`` sum to the whole."""
    return {
        "allocated_bytes": split.moment.allocated_bytes,
        "by_category": {str(part.key): part.bytes for part in split.by_category.parts},
        "category_sources": split.category_sources,
        "by_module": _modules(split.by_module, report.tree),
        "by_op": [{"op": part.key, **to_json(part)} for part in split.by_op.parts],
        "by_source": [{**source_to_json(part.key), **to_json(part)} for part in split.by_source.parts],
        "by_stack": [
            {"frames": [f"{line.file}:{line.line}:{line.function}" for line in part.key or ()], **to_json(part)}
            for part in split.by_stack.parts
        ],
        "by_phase": [{"phase": part.key, **to_json(part)} for part in split.by_phase.parts],
        "largest_storages": to_json(find_largest(split.holding, report.sources, largest)),
    }


def _modules(breakdown: Breakdown[int], tree: ModuleTree) -> list[Json]:
    """Returns a row for each module with bytes of its own or in its children; ``bytes`` sum to the whole."""
    own, outside = bytes_by_node(breakdown, tree)
    total = tree.with_children(own)
    storages = {part.key: part.storages for part in breakdown.parts}
    rows: list[Json] = [
        {
            "module": tree.names[node],
            "type": tree.types[node],
            "bytes": int(own[node]),
            "with_children_bytes": int(total[node]),
            "storages": storages.get(node, 0),
        }
        for node in np.lexsort((-total, -own)).tolist()
        if own[node] or total[node]
    ]
    if outside:
        rows.append(
            {
                "module": None,
                "type": None,
                "bytes": outside,
                "with_children_bytes": outside,
                "storages": storages[None],
            }
        )
    return rows


def _saved(report: Report) -> Json:
    summary = report.saved_summary
    return {
        "op_id": summary.op_id,
        "total_bytes": summary.by_module.total_bytes,
        "storages": summary.storages,
        "by_module": _modules(summary.by_module, report.tree),
    }


def _rank(one: RankSummary) -> Json:
    return {
        "rank": one.rank,
        "node": one.node or None,
        "device": one.device,
        "peak_allocated_bytes": one.peak.allocated_bytes if one.peak else None,
        "peak_phase": one.peak.phase if one.peak else None,
        "step_time_us": number(one.step_time_us),
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
