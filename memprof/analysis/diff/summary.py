"""Summarizes a recording: the input of a comparison, and what is committed as a baseline.

A summary made from a recording holds every part of each phase's fullest moment; its JSON holds the largest.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from memprof.analysis.diff.summary_model import OTHERS, PEAK, Spot, Summary, read_summary, summary_to_json
from memprof.analysis.diff.traits import rounds_of, traits_of
from memprof.analysis.host.host_use import HostUse
from memprof.analysis.leaks.leaks import find_leaks
from memprof.analysis.ranks.rank_report import compare_ranks
from memprof.analysis.report.breakdown import hold_at
from memprof.analysis.report.module_tree import module_tree
from memprof.analysis.report.moments import CategoryMaximum, Moment, find_category_maxima, find_peak, find_phase_peaks
from memprof.analysis.report.own_categories import with_own_categories
from memprof.analysis.report.sources import find_sources
from memprof.analysis.report.splits import KINDS, NOTHING, Splits
from memprof.errors import BadInputError, PolicyError
from memprof.policies.plan.prediction import input_shapes
from memprof.policies.runtime.model_names import WRAPPERS
from memprof.replay.live import alive_at
from memprof.trace.manifest import IMPORTED, PREDICTED, Manifest
from memprof.trace.schema import NONE, Ints
from memprof.trace.step import Step
from memprof.trace.store import Trace
from memprof.trace.whole_steps import has_untouched_step, require_whole_step

__all__ = [
    "KINDS",
    "NOTHING",
    "OTHERS",
    "PEAK",
    "Spot",
    "Summary",
    "read_summary",
    "summarise",
    "summarise_step",
    "summary_to_json",
]


def summarise(trace: Trace) -> Summary:
    """Summarizes a recording: the fullest step of the rank with the highest peak.

    Raises:
        BadInputError: It contains no operators, or is damaged.
        InconclusiveError: It contains no complete step.
    """
    worst, peaks = trace, {}
    if len(trace.ranks) > 1:
        found = compare_ranks(trace)
        peaks = {str(one.rank): one.peak_bytes for one in found.ranks if one.peak_bytes is not None}
        worst = trace if found.worst is None else trace.rank_trace(found.worst)
    require_whole_step(worst)
    step = worst.fullest_step()
    if not len(step.ops):
        raise BadInputError(f"{trace.path}: step {step.number} contains no operators.")
    made = summarise_step(step, worst.manifest, worst.earlier_stacks(step))
    backend, capture = worst.manifest.backend.name, worst.manifest.capture
    is_known = has_untouched_step(worst) or backend == PREDICTED
    return dataclasses.replace(
        made,
        step_time_us=step.duration_us if is_known else math.nan,
        rank_peaks=peaks or made.rank_peaks,
        step_peaks=tuple(worst.step_peaks().values()),
        is_complete=capture.is_complete,
        lower_bound="" if capture.is_complete or backend not in IMPORTED else capture.reason,
        host_bytes=float(HostUse.of(trace).total_bytes) or math.nan,
        growth_bytes=math.nan if (grown := find_leaks(worst).growth.bytes_per_step) is None else float(grown),
    )


def summarise_step(step: Step, manifest: Manifest | None = None, earlier_stacks: Ints | None = None) -> Summary:
    """Summarizes one step, with its durations as recorded.

    Args:
        step: The step; it has operators.
        manifest: The manifest of its recording.
        earlier_stacks: The step's ``Trace.earlier_stacks``; None where not known.
    """
    manifest = manifest or Manifest()
    sources, tree = find_sources(step.stacks), module_tree(step.modules)
    own = with_own_categories(step, manifest.categories, earlier_stacks)
    splits = Splits(own, sources, tree)
    moments = {PEAK: find_peak(step, sources)} | {one.phase: one for one in find_phase_peaks(step, sources)}
    parts = {op_id: splits.at(hold_at(own, op_id)) for op_id in {moment.op_id for moment in moments.values()}}
    spots = {name: _spot(moment, parts[moment.op_id]) for name, moment in moments.items()}
    wrapped, replaced = _wrapped_models(step)
    spots = {name: _inside(spot, replaced) for name, spot in spots.items()} if replaced else spots
    lines = {line.place: (line.file, line.line) for frames in sources.user_frames for line in frames[:1]}
    state_names = step.storages.name[step.storages.category == "optimizer_state"]
    held = {place for spot in spots.values() for place in spot.parts["source"]}
    again = step.ops.is_recompute
    recompute = step.ops.duration_us[again]
    maxima = find_category_maxima(own)
    reserved = int(step.memory.reserved_bytes.max(initial=-1))
    return Summary(
        name=manifest.target,
        frame=_frame(step, manifest),
        model=_model(step, wrapped),
        plan=_plan(manifest),
        spots=spots,
        maxima={name: one.maximum_bytes for name, one in maxima.items()},
        step_time_us=step.duration_us,
        recompute_time_us=float(recompute.sum()) if not np.isnan(recompute).any() else math.nan,
        reserved_bytes=reserved,
        parameter_bytes=int(step.modules.parameter_bytes.sum()),
        dtypes=_dtypes(own, maxima),
        states=tuple(sorted({str(name).rpartition(".")[2] for name in state_names if name})),
        step_peaks=(spots[PEAK].bytes,),
        start_bytes=step.bytes_at_start(),
        recomputed_ops=int(again.sum()),
        rank_peaks={str(manifest.rank): spots[PEAK].bytes},
        is_complete=True,
        lines={place: line for place, line in lines.items() if place in held},
        traits=traits_of(step, sources),
    )


def _spot(moment: Moment, parts: dict[str, dict[str, int]]) -> Spot:
    source = moment.source
    return Spot(
        bytes=moment.allocated_bytes,
        phase=moment.phase,
        op=moment.op,
        module=moment.module_title or "",
        line="" if source is None else source.place,
        file="" if source is None else source.file,
        parts=parts,
    )


def _inside(spot: Spot, replaced: Sequence[tuple[str, str]]) -> Spot:
    """Returns a spot with modules as the models inside their wrappers name them."""

    def name_inside(name: str) -> str:
        for pattern, inside in replaced:
            name = re.sub(pattern, inside, name)
        return name

    parts: dict[str, dict[str, int]] = dict(spot.parts)
    for kind in ("module", "storage"):
        sums: Counter[str] = Counter()
        for name, size in spot.parts[kind].items():  # a wrapper and the model inside become one
            sums[name_inside(name)] += size
        parts[kind] = dict(sums)
    return dataclasses.replace(spot, module=name_inside(spot.module), parts=parts)


def _wrapped_models(step: Step) -> tuple[dict[int, str], list[tuple[str, str]]]:
    """Returns the types of models inside wrappers, by the wrapper's row, and what to replace in names of modules.

    torch.compile, DistributedDataParallel and PEFT put a model into others; PEFT puts each adapted layer into one, too.
    """
    modules = step.modules
    names, kinds, parents = modules.name.tolist(), modules.type.tolist(), modules.parent_id.tolist()
    found, replaced = {}, []
    for root in np.flatnonzero(modules.parent_id == NONE).tolist():
        chain, has_adapters = [root], False
        while True:
            kind, own = str(kinds[chain[-1]]), str(names[chain[-1]])
            children = {names[at].rpartition(".")[2]: at for at, parent in enumerate(parents) if parent == chain[-1]}
            is_tuner = has_adapters and own.endswith("base_model") and list(children) == ["model"]
            place = "base_model" if kind.startswith("Peft") else "model" if is_tuner else WRAPPERS.get(kind, "")
            if place not in children:
                break
            has_adapters |= place == "base_model"
            chain.append(children[place])
        if len(chain) > 1:
            found[root] = kind
            titles = "|".join(re.escape(str(names[row] or kinds[row])) for row in chain)
            replaced.append((rf"(?<![\w.]){re.escape(own)}\.", f"{kind}." if names[root] else ""))
            replaced.append((rf"(?<![\w.])({titles})(?![\w.])", kind))
            if has_adapters:
                replaced.append((r"\.base_layer(?!\w)", ""))
    return found, replaced


def _frame(step: Step, manifest: Manifest) -> dict[str, str]:
    machine = manifest.machine
    frame = {
        "device": machine.device_name or machine.device_kind,
        "torch": manifest.torch_version,
        "CUDA": machine.cuda,
        "allocator settings": machine.allocator_settings,
        "world size": str(manifest.world_size),
        "memory events": manifest.backend.name,
        "batch": ", ".join(input_shapes(step)[:8]),
        "micro-batches": str(rounds_of(step)),
    }
    return {name: value for name, value in frame.items() if value}


def _model(step: Step, wrapped: Mapping[int, str]) -> str:
    roots = np.flatnonzero(step.modules.parent_id == NONE)
    if not len(roots):
        return ""
    tree = module_tree(step.modules)
    sizes = tree.with_children(tree.sum_by_node(step.modules.module_id, step.modules.parameter_bytes))
    row = max(roots.tolist(), key=lambda root: int(sizes[tree.node_of_module[root]]))
    kind = wrapped.get(row, step.modules.type[row])
    return re.sub(r":\d+ ", " ", str(kind))  # an imported one may be named after a line, which an edit moves


def _plan(manifest: Manifest) -> str:
    if not manifest.plan:
        return ""
    from memprof.policies.plan.plan_tables import plan_from_tables  # most recordings have no plan

    try:
        return plan_from_tables(manifest.plan).describe()
    except PolicyError:
        return "one that this version of memprof cannot read"


def _dtypes(step: Step, maxima: Mapping[str, CategoryMaximum]) -> dict[str, dict[str, int]]:
    """Splits each category by dtype, at its own maximum: the same moment wherever the peak lies."""
    storages = step.storages
    found: dict[str, dict[str, int]] = {}
    for category, maximum in maxima.items():
        rows = np.flatnonzero(alive_at(step, maximum.op_id) & (storages.category == category))
        sums: Counter[str] = Counter()
        for dtype, size in zip(storages.dtype[rows].tolist(), storages.allocated_bytes[rows].tolist(), strict=True):
            sums[dtype or "unknown"] += size
        found[category] = {dtype: size for dtype, size in sums.items() if size}
    return found
