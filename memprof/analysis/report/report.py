"""The content of `memprof report` as data; rendering is left to the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from memprof.analysis.allocator.device_verdict import DeviceVerdict, judge_device
from memprof.analysis.diff.budget import BudgetVerdict, judge_budget
from memprof.analysis.host.host_forecast import HostForecast
from memprof.analysis.host.host_use import HostUse
from memprof.analysis.leaks.leaks import growth_notice
from memprof.analysis.out_of_memory.post_mortem import PostMortem, examine
from memprof.analysis.report.breakdown import (
    Breakdown,
    Holding,
    by_category,
    by_metadata,
    by_module,
    by_op,
    by_phase,
    by_source,
    by_stack,
    category_sources,
    hold_at,
)
from memprof.analysis.report.module_tree import ModuleTree, folded_tree, module_tree
from memprof.analysis.report.moments import (
    CategoryMaximum,
    Moment,
    describe_moment,
    find_category_maxima,
    find_peak,
    find_peaks,
    find_phase_peaks,
    is_end_state_only,
)
from memprof.analysis.report.notes import Note, find_unread, write_notes
from memprof.analysis.report.own_categories import with_own_categories
from memprof.analysis.report.saved import (
    RecomputeCost,
    SavedStorages,
    SavedSummary,
    find_saved,
    summarise_saved,
    weigh_recompute,
)
from memprof.analysis.report.sources import SourceLine, Sources, find_sources
from memprof.analysis.report.whole_loop import LoopMoment, describe_moments, find_loop_moments
from memprof.analysis.report.whole_run import DeviceUse, run_json, run_notes, summarise_devices
from memprof.analysis.report.why import find_causes
from memprof.errors import PolicyError, UsageError
from memprof.trace.manifest import Manifest
from memprof.trace.schema import DeviceMemory, Holders, Ints, Steps
from memprof.trace.step import Step
from memprof.trace.store import Trace

if TYPE_CHECKING:
    from memprof.analysis.ranks.rank_report import RankComparison, RankPeak


@dataclass(frozen=True)
class StepSummary:
    """One step of the job.

    Attributes:
        step: Its number.
        kind: ``recorded``, ``warm_up``, ``timed`` or ``plain``.
        duration_us: Its duration.
        is_complete: False when the recording ended during the step.
        peak: Its peak; None where no operators were recorded.
    """

    step: int
    kind: str
    duration_us: float
    is_complete: bool
    peak: Moment | None


@dataclass(frozen=True, eq=False)
class MomentSplit:
    """Live memory at one moment, split every way; each split sums to ``moment.allocated_bytes``.

    Attributes:
        moment: The moment.
        holding: The live memory.
        by_category: Split by category.
        category_sources: For imported memory, bytes by category and how it was determined.
        by_module: Split by node of ``Report.tree``, without children.
        by_op: Split by the operator that allocated it.
        by_source: Split by the user's line of code that allocated it.
        by_stack: Split by the user's frames, innermost first, of the allocation stack.
        by_phase: Split by the phase in which it was allocated.
        by_metadata: Split by what the job noted of it in an imported snapshot.
    """

    moment: Moment
    holding: Holding
    by_category: Breakdown[str]
    category_sources: dict[str, dict[str, int]]
    by_module: Breakdown[int]
    by_op: Breakdown[str]
    by_source: Breakdown[SourceLine]
    by_stack: Breakdown[tuple[SourceLine, ...]]
    by_phase: Breakdown[str]
    by_metadata: Breakdown[str]


@dataclass(frozen=True, eq=False)
class Report:
    """The report on one step of a trace, and on the trace around it.

    Attributes:
        path: The trace, as it was named.
        manifest: The recording's manifest.
        rank: The reported rank.
        compared: Comparison of the ranks, None for a single-rank job.
        steps: All steps seen.
        step_peaks: Peak by step number, in order, for the steps that count towards the run's peak.
        step: The reported step.
        tree: The modules, one by one or with repeated layers folded into one node.
        sources: Source lines of the trace's stacks.
        reserved_bytes: Peak reserved bytes of the step; None where the allocator has none, as on CPU.
        has_history: Whether allocations were recorded; a snapshot without them shows what was in use at its end.
        at_peak: Live memory at the step's peak.
        at_moment: Live memory at another requested moment, else None.
        category_maxima: Each category's own maximum over the step.
        phase_peaks: The fullest moment of each phase.
        saved: What the step saves for backward.
        saved_summary: The same summed by node of ``tree``, at its fullest or at the requested moment.
        recompute: Activation checkpointing evaluated for each node of ``tree``.
        recomputed_us: Time already spent on recompute in the step, NaN where unknown.
        host: Host memory of the job's processes.
        forecast: That of the job itself, of a dry run; None for other recordings.
        devices: The whole devices of the job, each at its fullest; none on the CPU.
        notes: Caveats on the figures.
        growth: Whether memory grows, with the line and its holder; "" where it does not.
        plan: Effect of the plan in force, in words, "" without a plan.
        verdict: Whether the job fits its device.
        budget: Whether it fits its budget; None without one.
        run: For a light recording, the whole run as JSON containers, else None.
        moments: Moments of a dry run of a whole loop; empty for other recordings.
        post_mortem: For a job in which memory ran out, the failed request and the live memory, else None.
    """

    path: str
    manifest: Manifest
    rank: int
    compared: RankComparison | None
    steps: tuple[StepSummary, ...]
    step_peaks: dict[int, int]
    step: Step
    tree: ModuleTree
    sources: Sources
    reserved_bytes: int | None
    has_history: bool
    at_peak: MomentSplit
    at_moment: MomentSplit | None
    category_maxima: dict[str, CategoryMaximum]
    phase_peaks: tuple[Moment, ...]
    saved: SavedStorages
    saved_summary: SavedSummary
    recompute: tuple[RecomputeCost, ...]
    recomputed_us: float
    host: HostUse
    forecast: HostForecast | None
    devices: tuple[DeviceUse, ...]
    notes: tuple[Note, ...]
    growth: str
    plan: str
    verdict: DeviceVerdict
    budget: BudgetVerdict | None = None
    run: dict[str, Any] | None = None
    moments: tuple[LoopMoment, ...] = ()
    post_mortem: PostMortem | None = None

    @property
    def shown(self) -> MomentSplit:
        """The moment shown in the tables."""
        return self.at_moment or self.at_peak

    @property
    def ranks(self) -> tuple[RankPeak, ...]:
        """Each rank at its peak, empty for a single-rank job."""
        return () if self.compared is None else self.compared.ranks


def build_report(
    trace: Trace,
    rank: int | None = None,
    step_number: int | None = None,
    op_id: int | None = None,
    fold_layers: bool = False,
    categories: Sequence[str] = (),
) -> Report:
    """Builds the report of a trace.

    Args:
        trace: The trace.
        rank: The rank to report on; None for the one with the highest peak.
        step_number: The step to report on; None for the fullest step.
        op_id: The moment to show in addition to the peak, counted from 0 in the step; None for the peak alone.
        fold_layers: Whether to show layers that are alike (``layers.0``, ``layers.1``, ...) as one module.
        categories: Rules of the user's own categories; those of the recording where left out.

    Raises:
        BadInputError: The trace contains no operators, or is damaged.
        UsageError: The rank, step or operator does not exist.
    """
    compared: RankComparison | None = None
    notes: tuple[Note, ...] = ()
    if len(trace.ranks) > 1 or trace.manifest.world_size > 1:
        from memprof.analysis.ranks.rank_report import compare_ranks, job_notes  # most recordings are of one process

        compared = compare_ranks(trace) if len(trace.ranks) > 1 else None
        notes = tuple(Note(sentence, is_warning=True) for sentence in job_notes(trace))
    chosen = compared.worst if rank is None and compared is not None else rank
    host = HostUse.of(trace)
    forecast = HostForecast.of(trace, host)
    notes += tuple(Note(sentence, is_warning=True) for sentence in (forecast or host).warnings())
    if chosen is not None:
        trace = trace.rank_trace(chosen)
    step = trace.fullest_step() if step_number is None else trace.step(step_number)
    _check_op_id(step, op_id)
    modules, sources = module_tree(step.modules), find_sources(step.stacks)
    tree = folded_tree(step.modules) if fold_layers else modules
    saved = find_saved(step)
    budget = None if trace.manifest.budget_bytes is None else judge_budget(trace, trace.manifest.budget_bytes)
    loop = describe_moments(trace) if budget is None else ""
    notes = (*((Note(f"Moments: {loop}.", is_warning=False),) if loop else ()), *notes)
    growth = growth_notice(trace)
    notes += (Note(growth, is_warning=True),) if growth else ()
    peak, earlier = find_peak(step, sources), trace.earlier_stacks(step)
    unread = find_unread(trace, step, sources)
    causes = find_causes(step, sources, trace.table(Holders), peak.op_id, peak.allocated_bytes)
    notes = (
        *run_notes(trace, peak.allocated_bytes),
        *notes,
        *(Note(one.describe(), is_warning=False) for one in unread),
        *(Note(text, is_warning=False) for text in causes),
    )
    own = with_own_categories(step, categories or trace.manifest.categories, earlier)
    return Report(
        path=str(trace.path),
        manifest=trace.manifest,
        rank=trace.rank,
        compared=compared,
        steps=_summarise_steps(trace, sources),
        step_peaks=trace.step_peaks(),
        step=step,
        tree=tree,
        sources=sources,
        reserved_bytes=_reserved_bytes(step),
        has_history=not is_end_state_only(trace),
        at_peak=_split_moment(own, tree, sources, peak.op_id, earlier),
        at_moment=None if op_id is None else _split_moment(own, tree, sources, op_id, earlier),
        category_maxima=find_category_maxima(own),
        phase_peaks=find_phase_peaks(step, sources),
        saved=saved,
        saved_summary=summarise_saved(step, saved, tree, op_id),
        recompute=weigh_recompute(step, saved, modules, tree),
        recomputed_us=_recomputed_us(step),
        host=host,
        forecast=forecast,
        devices=summarise_devices(trace.table(DeviceMemory)),
        notes=notes + write_notes(trace.manifest, trace.table(Steps), step),
        run=run_json(trace),
        moments=find_loop_moments(trace),
        post_mortem=examine(trace),
        verdict=judge_device(trace),
        budget=budget,
        growth=growth,
        plan=_describe_plan(trace.manifest),
    )


def _describe_plan(manifest: Manifest) -> str:
    if not manifest.plan:
        return ""
    from memprof.policies.plan.plan_tables import plan_from_tables, policy_tables  # most traces have no plan

    try:
        return plan_from_tables(manifest.plan).describe()
    except PolicyError:
        # From a newer memprof, with policies or settings unknown to this version.
        return ", ".join(policy_tables(manifest.plan))


def _check_op_id(step: Step, op_id: int | None) -> None:
    if op_id is not None and not 0 <= op_id < len(step.ops):
        raise UsageError(f"step {step.number} has no operator {op_id}; it has operators 0 to {len(step.ops) - 1}.")


def _split_moment(step: Step, tree: ModuleTree, sources: Sources, op_id: int, earlier_stacks: Ints) -> MomentSplit:
    holding = hold_at(step, op_id, earlier_stacks)
    return MomentSplit(
        moment=describe_moment(step, sources, op_id, holding.total_bytes),
        holding=holding,
        by_category=by_category(holding),
        category_sources=category_sources(holding),
        by_module=by_module(holding, tree),
        by_op=by_op(holding),
        by_source=by_source(holding, sources),
        by_stack=by_stack(holding, sources),
        by_phase=by_phase(holding),
        by_metadata=by_metadata(holding),
    )


def _summarise_steps(trace: Trace, sources: Sources) -> tuple[StepSummary, ...]:
    steps = trace.table(Steps)
    peaks = find_peaks(trace, sources)
    return tuple(
        StepSummary(
            step=int(steps.step[row]),
            kind=str(steps.kind[row]),
            duration_us=float(steps.duration_us[row]),
            is_complete=bool(steps.is_complete[row]),
            peak=peaks.get(int(steps.step[row])),
        )
        for row in np.argsort(steps.step, kind="stable").tolist()
    )


def _reserved_bytes(step: Step) -> int | None:
    highest = int(step.memory.reserved_bytes.max(initial=-1))
    return None if highest < 0 else highest


def _recomputed_us(step: Step) -> float:
    durations = step.ops.duration_us[step.ops.is_recompute]
    return float("nan") if len(durations) and np.isnan(durations).all() else float(np.nansum(durations))
