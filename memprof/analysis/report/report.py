"""Everything `memprof report` says about a trace, as data; drawing it is the command line's business."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from memprof.analysis.out_of_memory.post_mortem import PostMortem, examine
from memprof.analysis.ranks.rank_report import RankComparison, RankPeak, compare_ranks, job_notes
from memprof.analysis.report.breakdown import (
    Breakdown,
    Holding,
    by_category,
    by_module,
    by_op,
    by_phase,
    by_source,
    by_stack,
    hold_at,
)
from memprof.analysis.report.device_use import DeviceUse, summarise_devices
from memprof.analysis.report.host_memory import HostProcess, summarise_host_memory
from memprof.analysis.report.light_run import run_json, run_notes
from memprof.analysis.report.module_tree import ModuleTree, folded_tree, module_tree
from memprof.analysis.report.moments import (
    CategoryMaximum,
    Moment,
    describe_moment,
    find_category_maxima,
    find_peak,
    find_phase_peaks,
)
from memprof.analysis.report.notes import Note, write_notes
from memprof.analysis.report.recompute import RecomputeCost, weigh_recompute
from memprof.analysis.report.saved import SavedStorages, SavedSummary, find_saved, summarise_saved
from memprof.analysis.report.sources import SourceLine, Sources, find_sources
from memprof.errors import PolicyError, UsageError
from memprof.trace.cut import cuttable_steps
from memprof.trace.manifest import Manifest
from memprof.trace.schema import DeviceMemory, HostMemory, Ints, Steps
from memprof.trace.step import Step
from memprof.trace.store import Trace


@dataclass(frozen=True)
class StepSummary:
    """One step of the job.

    Attributes:
        step: Its number.
        kind: ``recorded``, ``warm_up``, ``timed`` or ``plain``.
        duration_us: How long it took.
        is_complete: False when the recording ended inside it.
        peak: Its peak; None where no operators were recorded.
    """

    step: int
    kind: str
    duration_us: float
    is_complete: bool
    peak: Moment | None


@dataclass(frozen=True)
class RankSummary:
    """One process of a distributed job.

    Attributes:
        rank: Its rank.
        node: The machine it ran on, "" where unknown.
        device: Where its storages are, such as ``cuda:0``.
        peak: The peak of its fullest step, without the line of code; None where it ran no operators.
        step_time_us: How long that step takes without the recorder, NaN where there is none.
    """

    rank: int
    node: str
    device: str
    peak: Moment | None
    step_time_us: float


@dataclass(frozen=True, eq=False)
class MomentSplit:
    """What is alive at one moment, split every way; each split sums to ``moment.allocated_bytes``.

    Attributes:
        moment: The moment.
        holding: What is alive then.
        by_category: By what it is for.
        by_module: By node of ``Report.tree``, without children.
        by_op: By the operator that made it.
        by_source: By the user's line of code that made it.
        by_stack: By the user's frames, innermost first, of the Python stack that made it.
        by_phase: By the phase in which it was made.
    """

    moment: Moment
    holding: Holding
    by_category: Breakdown[str]
    by_module: Breakdown[int]
    by_op: Breakdown[str]
    by_source: Breakdown[SourceLine]
    by_stack: Breakdown[tuple[SourceLine, ...]]
    by_phase: Breakdown[str]


@dataclass(frozen=True, eq=False)
class Report:
    """What there is to say about one step of a trace, and about the trace around it.

    Attributes:
        path: The trace, as it was named.
        manifest: What the recording says about itself.
        rank: The rank reported on.
        ranks: A summary of each rank, empty for a job of one.
        worst_rank: The rank with the highest peak, None for a job of one.
        compared: The ranks side by side, None for a job of one.
        steps: Every step seen.
        step_peaks: Peak of each step that counts for that of the run, by its number, in their order.
        step: The step reported on.
        tree: The modules, one by one or with repeated layers folded into one node.
        sources: Source lines of the trace's stacks.
        reserved_bytes: Highest reserved bytes of the step; None where the allocator has none, as on CPU.
        at_peak: What is alive at the step's peak.
        at_moment: The same of another moment that was asked for, else None.
        category_maxima: Each category's own maximum over the step.
        phase_peaks: The fullest moment of each phase.
        saved: What the step keeps for backward.
        saved_summary: The same summed by node of ``tree``, at its fullest or at the moment asked for.
        recompute: Activation checkpointing weighed for each node of ``tree``.
        recomputed_us: What recomputing takes in the step already, NaN when unknown.
        host: Main memory of the job's processes.
        devices: The whole devices of the job, each at its fullest; none on a processor.
        notes: What a reader has to know to judge the figures.
        plan: What the plan in force does, in words, "" where there was none.
        run: Of a light recording, the whole run as JSON containers, else None.
        post_mortem: Of a job in which memory ran out, who asked for how much and what was full, else None.
    """

    path: str
    manifest: Manifest
    rank: int
    ranks: tuple[RankSummary, ...]
    worst_rank: int | None
    compared: RankComparison | None
    steps: tuple[StepSummary, ...]
    step_peaks: dict[int, int]
    step: Step
    tree: ModuleTree
    sources: Sources
    reserved_bytes: int | None
    at_peak: MomentSplit
    at_moment: MomentSplit | None
    category_maxima: dict[str, CategoryMaximum]
    phase_peaks: tuple[Moment, ...]
    saved: SavedStorages
    saved_summary: SavedSummary
    recompute: tuple[RecomputeCost, ...]
    recomputed_us: float
    host: tuple[HostProcess, ...]
    devices: tuple[DeviceUse, ...]
    notes: tuple[Note, ...]
    plan: str
    run: dict[str, Any] | None = None
    post_mortem: PostMortem | None = None

    @property
    def shown(self) -> MomentSplit:
        """The moment that the tables are of."""
        return self.at_moment or self.at_peak


def build_report(
    trace: Trace,
    rank: int | None = None,
    step_number: int | None = None,
    op_id: int | None = None,
    fold_layers: bool = False,
) -> Report:
    """Reads everything off a trace.

    Args:
        trace: The trace.
        rank: The rank to report on; None for the one with the highest peak.
        step_number: The step to report on; None for the fullest step.
        op_id: The moment to show beside the peak, counted from 0 in the step; None for the peak alone.
        fold_layers: Show layers that are alike (``layers.0``, ``layers.1``, ...) as one module.

    Raises:
        BadInputError: The trace holds no operators, or is damaged.
        UsageError: There is no such rank, step or operator.
    """
    compared = compare_ranks(trace) if len(trace.ranks) > 1 else None
    worst_rank = None if compared is None else compared.worst
    notes = tuple(Note(sentence, is_warning=True) for sentence in job_notes(trace))
    chosen = rank if rank is not None else worst_rank
    if chosen is not None:
        trace = trace.rank_trace(chosen)
    step = trace.fullest_step() if step_number is None else trace.step(step_number)
    _check_op_id(step, op_id)
    modules, sources = module_tree(step.modules), find_sources(step.stacks)
    tree = folded_tree(step.modules) if fold_layers else modules
    saved = find_saved(step)
    peak, earlier = find_peak(step, sources), trace.earlier_stacks(step)
    return Report(
        path=str(trace.path),
        manifest=trace.manifest,
        rank=trace.rank,
        ranks=() if compared is None else tuple(_summarise_rank(one) for one in compared.ranks),
        worst_rank=worst_rank,
        compared=compared,
        steps=_summarise_steps(trace, sources),
        step_peaks=trace.step_peaks(),
        step=step,
        tree=tree,
        sources=sources,
        reserved_bytes=_reserved_bytes(step),
        at_peak=_split_moment(step, tree, sources, peak.op_id, earlier),
        at_moment=None if op_id is None else _split_moment(step, tree, sources, op_id, earlier),
        category_maxima=find_category_maxima(step),
        phase_peaks=find_phase_peaks(step, sources),
        saved=saved,
        saved_summary=summarise_saved(step, saved, tree, op_id),
        recompute=weigh_recompute(step, saved, modules, tree),
        recomputed_us=_recomputed_us(step),
        host=summarise_host_memory(trace.table(HostMemory)),
        devices=summarise_devices(trace.table(DeviceMemory)),
        notes=run_notes(trace, peak.allocated_bytes) + notes + write_notes(trace.manifest, trace.table(Steps), step),
        run=run_json(trace),
        post_mortem=examine(trace),
        plan=_describe_plan(trace.manifest),
    )


def _describe_plan(manifest: Manifest) -> str:
    if not manifest.plan:
        return ""
    from memprof.policies.plan.plan_tables import plan_from_tables, policy_tables  # most traces have no plan

    try:
        return plan_from_tables(manifest.plan).describe()
    except PolicyError:
        # Of a newer memprof: it knows policies or settings that this one does not.
        return ", ".join(policy_tables(manifest.plan))


def _check_op_id(step: Step, op_id: int | None) -> None:
    if op_id is not None and not 0 <= op_id < len(step.ops):
        raise UsageError(f"Step {step.number} has no operator {op_id}; it has operators 0 to {len(step.ops) - 1}.")


def _split_moment(step: Step, tree: ModuleTree, sources: Sources, op_id: int, earlier_stacks: Ints) -> MomentSplit:
    holding = hold_at(step, op_id, earlier_stacks)
    return MomentSplit(
        moment=describe_moment(step, sources, op_id, holding.total_bytes),
        holding=holding,
        by_category=by_category(holding),
        by_module=by_module(holding, tree),
        by_op=by_op(holding),
        by_source=by_source(holding, sources),
        by_stack=by_stack(holding, sources),
        by_phase=by_phase(holding),
    )


def _summarise_steps(trace: Trace, sources: Sources) -> tuple[StepSummary, ...]:
    steps = trace.table(Steps)
    is_cuttable = cuttable_steps(steps)
    return tuple(
        StepSummary(
            step=int(steps.step[row]),
            kind=str(steps.kind[row]),
            duration_us=float(steps.duration_us[row]),
            is_complete=bool(steps.is_complete[row]),
            peak=find_peak(trace.step(int(steps.step[row])), sources) if is_cuttable[row] else None,
        )
        for row in np.argsort(steps.step, kind="stable").tolist()
    )


def _summarise_rank(one: RankPeak) -> RankSummary:
    if one.peak_bytes is None or one.step is None or one.op_id is None:
        return RankSummary(one.rank, one.node, one.device, None, float("nan"))
    peak = Moment(
        step=one.step,
        op_id=one.op_id,
        phase=one.phase,
        op=one.op,
        module=one.module or None,
        module_title=one.module or None,
        source=None,
        allocated_bytes=one.peak_bytes,
    )
    return RankSummary(one.rank, one.node, one.device, peak, one.step_time_us)


def _reserved_bytes(step: Step) -> int | None:
    highest = int(step.memory.reserved_bytes.max(initial=-1))
    return None if highest < 0 else highest


def _recomputed_us(step: Step) -> float:
    durations = step.ops.duration_us[step.ops.is_recompute]
    return float("nan") if len(durations) and np.isnan(durations).all() else float(np.nansum(durations))
