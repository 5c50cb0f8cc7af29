"""The predicted effect of a plan on a recorded step: before, after, and how each number was obtained."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memprof.analysis.allocator.reserved import reserved_under
from memprof.analysis.plans.basis import Basis, basis_of_steps
from memprof.analysis.report.moments import Moment, find_peak, find_phase_peaks
from memprof.analysis.report.sources import find_sources
from memprof.machines.catalogue import machine_of_device
from memprof.policies.base import SOURCES, Policy
from memprof.policies.plan.interval import interval_of
from memprof.policies.plan.plan import Plan, require_predictable
from memprof.policies.plan.plan_tables import plan_to_tables
from memprof.policies.plan.prediction import Prediction
from memprof.policies.plan.several_steps import sources_of, steps_under
from memprof.replay.live import fullest_of, live_bytes, live_bytes_by_category
from memprof.trace.files.spool import DRY_RUN, GRADIENTS_ENABLED
from memprof.trace.manifest import PREDICTED, Backend, Capture, Manifest, Window
from memprof.trace.schema import (
    ModuleCalls,
    Modules,
    Ops,
    Saved,
    Stacks,
    Steps,
    Storages,
    Table,
    Uses,
)
from memprof.trace.step import Step
from memprof.trace.store import Trace
from memprof.trace.whole_steps import has_untouched_step
from memprof.version import __version__


@dataclass(frozen=True)
class Stage:
    """One policy, and the step under it and all preceding policies.

    Attributes:
        policy: The policy.
        peak_allocated_bytes: Peak of that step.
        change_bytes: By how much the policy raises the peak.
        step_time_us: Its step time.
        numerics: The policy's effect on the numbers of the job.
        how: How the policy's effect was obtained, one of policies.base.SOURCES.
        changes: What it changes beyond rounding, and in the job's loop.
        reserved_bytes: Modelled peak reserved bytes of the caching allocator; None on the CPU.
        host_bytes: Pinned host memory of all these policies' copies.
    """

    policy: Policy
    peak_allocated_bytes: int
    change_bytes: int
    step_time_us: float
    numerics: str
    how: str
    changes: tuple[str, ...]
    reserved_bytes: int | None
    host_bytes: int


@dataclass(frozen=True)
class Side:
    """One of two steps being compared.

    Attributes:
        peak: Its peak.
        step_time_us: Its step time.
        phases: The fullest moment of each of its phases.
        categories: Live bytes at the peak, by category; they sum to the peak.
        reserved_bytes: Modelled peak reserved bytes of the caching allocator; None on the CPU.
    """

    peak: Moment
    step_time_us: float
    phases: dict[str, Moment]
    categories: dict[str, int]
    reserved_bytes: int | None = None


@dataclass(frozen=True, eq=False)
class Forecast:
    """Recorded steps, and the same steps under a plan.

    Attributes:
        trace: The recording, as it was named.
        manifest: The recording's manifest.
        plan: The plan with its prediction.
        recorded: The fullest step as recorded.
        predicted: The fullest step as predicted, which may be a different one.
        stages: Result of each policy in order, on top of the preceding ones.
        step: The fullest predicted step.
        basis: The steps it was predicted from.
        warnings: Caveats on the figures.
    """

    trace: str
    manifest: Manifest
    plan: Plan
    recorded: Side
    predicted: Side
    stages: tuple[Stage, ...]
    step: Step
    basis: Basis
    warnings: tuple[str, ...]


def forecast(trace: Trace, plan: Plan, basis: Basis | None = None) -> Forecast:
    """Predicts the effect of a plan on a recorded job.

    Args:
        trace: The recording.
        plan: The plan.
        basis: The steps to start from; None for all, as recorded.

    Raises:
        BadInputError: The trace contains no operators, or is damaged.
        PolicyError: A policy does not apply to the step, or contradicts another one.
    """
    require_predictable(plan.policies)
    basis = basis or basis_of_steps(trace)
    stages = []
    steps = whole = (basis.step, *basis.others)
    sources = sources_of(plan.policies, basis.dry_steps)
    # Of a dry run, the policies in it come first.
    in_order = sorted(plan.policies, key=lambda policy: bool(basis.dry_steps) and not policy.changes_kernels)
    peak_bytes = max(int(live_bytes(step).during.max(initial=0)) for step in whole)
    for count, policy in enumerate(in_order, start=1):
        first, before_bytes = Plan(tuple(in_order[:count])), peak_bytes
        steps = steps_under(first.policies, whole, basis.dry_steps)
        peak_bytes = max(int(live_bytes(step).during.max(initial=0)) for step in steps)
        stage = Stage(
            policy=policy,
            peak_allocated_bytes=peak_bytes,
            change_bytes=peak_bytes - before_bytes,
            step_time_us=steps[0].duration_us,
            numerics=policy.numerics_in(basis.step),
            how=sources[plan.policies.index(policy)],
            changes=Plan((policy,)).caveats(basis.step),
            reserved_bytes=reserved_under(fullest_of(steps), trace.manifest, first),
            host_bytes=basis.host_bytes_under(first),
        )
        stages.append(stage)
    recorded, predicted = fullest_of(whole), fullest_of(steps)
    how = max(basis.scaled_by or SOURCES[0], SOURCES[0], *sources, key=SOURCES.index)
    interval = interval_of(plan.policies, whole, steps, dry_steps=basis.dry_steps)
    prediction = Prediction.of_steps(whole, steps, interval, trace=str(trace.path), how=how, machine=basis.machine)
    prediction = dataclasses.replace(prediction, changes=plan.caveats(basis.step)).with_times(
        basis.time_interval(plan, prediction.step_time_us)
    )
    return Forecast(
        trace=str(trace.path),
        manifest=trace.manifest,
        plan=dataclasses.replace(plan, prediction=prediction, at_batch=basis.batch, at_length=basis.length),
        recorded=dataclasses.replace(
            side_of(recorded),
            step_time_us=basis.step.duration_us,
            reserved_bytes=reserved_under(recorded, trace.manifest),
        ),
        predicted=dataclasses.replace(
            side_of(predicted),
            step_time_us=steps[0].duration_us,
            reserved_bytes=stages[-1].reserved_bytes if stages else reserved_under(predicted, trace.manifest, plan),
        ),
        stages=tuple(stages),
        step=predicted,
        basis=basis,
        warnings=(
            *step_warnings(trace, basis.step),
            *basis.warnings,
            *plan.caveats(basis.step),
            *filter(None, [basis.describe_rounding(plan, trace.manifest.torch_version)]),
        ),
    )


def words_for_record(manifest: Manifest) -> str:
    """Returns the arguments of ``memprof record`` that run the recorded job again, quoted for a shell."""
    return words_of(manifest.command) if manifest.command else "train.py"


def words_of(command: Sequence[str]) -> str:
    """Returns the arguments of ``memprof record`` that run a command line, quoted for a shell."""
    is_python = Path(command[0]).name.startswith("python")
    return shlex.join(command[1:] if is_python else ("--", *command))


def commands_under(manifest: Manifest, plan: str) -> list[str]:
    """Returns the commands that run a recorded job under a plan's file: a dry run first where the recording is one."""
    named, job = f"--plan {shlex.quote(plan)}", words_for_record(manifest)
    train = f"memprof record {named} {job}"
    if manifest.backend.name != DRY_RUN and not manifest.dry_ranks:
        return [train]
    device = machine_of_device(manifest.machine.device_name)
    on = "" if device is None else f" --device {shlex.quote(device.name)}"
    ranks = f" --ranks {manifest.dry_ranks}" if manifest.dry_ranks else ""
    nodes = f" --nodes {manifest.dry_nodes}" if manifest.dry_nodes > 1 else ""
    return [f"memprof record --dry-run{on}{ranks}{nodes} {named} {job}", *([] if ranks else [train])]


def step_warnings(trace: Trace, step: Step) -> list[str]:
    """Returns the caveats on a step that predictions start from."""
    manifest, steps = trace.manifest, trace.table(Steps)
    warnings = []
    if manifest.plan:
        was = "predicted" if manifest.backend.name == PREDICTED else "recorded"
        warnings.append(f"{trace.path} was {was} under a plan already: this prediction is relative to that run.")
    if (steps.kind[steps.step == step.number] == "warm_up").any():
        warnings.append(
            f"step {step.number} is a warm-up step: optimizer state may be missing or first allocated in it."
        )
    if manifest.backend.name == DRY_RUN:
        warnings.append(f"{trace.path} is a dry run: nothing was measured, its times are lower bounds.")
    elif not has_untouched_step(trace) and manifest.backend.name != PREDICTED:
        warnings.append(
            f"{trace.path} has no step without the recorder, so step time is that of a recorded step, which is too "
            "long: let the job run two steps longer than the window."
        )
    return [*warnings, *(note for note in manifest.notes if note.startswith(GRADIENTS_ENABLED))]


def side_of(step: Step) -> Side:
    """Returns the figures of a step that are compared."""
    sources = find_sources(step.stacks)
    peak = find_peak(step, sources)
    return Side(
        peak=peak,
        step_time_us=step.duration_us,
        phases={moment.phase: moment for moment in find_phase_peaks(step, sources)},
        categories={name: int(curve[peak.op_id]) for name, curve in live_bytes_by_category(step).items()},
    )


def predicted_trace(made: Forecast) -> tuple[Manifest, dict[type[Table], Table]]:
    """Returns a trace of a predicted step, which opens like any recording."""
    step, recorded = made.step, made.manifest
    describes = made.plan.describe()
    manifest = dataclasses.replace(
        recorded,
        memprof_version=__version__,
        plan=plan_to_tables(made.plan),
        backend=Backend(
            name=PREDICTED,
            sees=(f"step {step.number} of {made.trace}, rewritten by: {describes}",),
            blind_spots=recorded.backend.blind_spots,
        ),
        capture=Capture(is_complete=True, reason=f"predicted from {made.trace}"),
        window=Window(skip=0, steps=1),
        op_times=f"predicted from {recorded.op_times}",
        notes=(f"predicted from step {step.number} of {made.trace} under: {describes}", *recorded.notes),
    )
    return manifest, {
        Modules: step.modules,
        ModuleCalls: step.module_calls.replace(step=np.full(len(step.module_calls), step.number)),
        Steps: Steps.of(
            step=[step.number],
            kind=["recorded"],
            start_us=[float(np.nanmin(step.ops.start_us)) if np.isfinite(step.ops.start_us).any() else 0.0],
            duration_us=[step.duration_us],
            micro_batches=[int(step.ops.micro_batch.max(initial=-1)) + 1],
            optimizer_updates=[1],
            first_op_id=[0],
            last_op_id=[len(step.ops) - 1],
            is_complete=[True],
        ),
        Ops: step.ops.replace(step=np.full(len(step.ops), step.number)),
        Storages: step.storages,
        Uses: step.uses,
        Saved: step.saved,
        Stacks: step.stacks,
    }
