"""Does remat keep its budget, with bit-identical numbers, and at what overhead?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lab.benchmarks.recording import JOBS, ONE_THREAD, ROOT, Job, peak_bytes, reason_of, run, run_for_json
from lab.benchmarks.section import Bar, Section
from memprof.errors import PolicyError
from memprof.planners.find import find_plan
from memprof.planners.graph.graph import graph_of
from memprof.planners.graph.project import remat_of
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from memprof.policies.remat.policy import Remat
from memprof.replay.time import op_cost_us
from memprof.trace.step import Step
from memprof.trace.store import Trace

#: The repeated part of each job, for checkpointing by layers; "" where there is none.
LAYERS = {"gpt": "layers.*", "resnet": "stages.*", "lstm": "layers.*", "unet": "down.*,up.*", "tree": ""}
ORDINARY = ("gpt", "resnet", "unet")
SHARES = (0.9, 0.7, 0.5, 0.4, 0.3)
#: How rows of budgets that checkpointing sets begin, and the columns that show them.
_BESIDE = {"checkpoint": "checkpointing", "as checkpoint": "remat at its peak"}
SHARE_BAR, OPERATOR_BAR_US, TIME_BAR = 0.01, 5.0, 1.03


@dataclass(frozen=True)
class Model:
    """One job.

    Attributes:
        title: Its name in the table.
        job: Its command.
        layers: The modules that are checkpointed for comparison; "" for none.
        shares: Budgets as shares of its peak.
        skip: Steps before the recording: evictions are planned within them, once steps repeat.
        is_ordinary: Its operators take milliseconds, as those of ordinary models do.
    """

    title: str
    job: Job
    layers: str
    shares: tuple[float, ...]
    skip: int
    is_ordinary: bool = False


@dataclass(frozen=True)
class Outcome:
    """One run within a budget.

    Attributes:
        row: Its cells.
        over: Highest recorded peak over the budget.
        is_equal: Whether every line that the job printed is that of the plain run.
        share_error: Predicted minus measured share of recomputed work; None where it was not predicted.
        slowdown: Time of a step over that of a plain one.
        overhead: The same over what the recomputed operators explain, 0 for small models.
    """

    row: tuple[str, ...]
    over: float
    is_equal: bool
    share_error: float | None
    slowdown: float
    overhead: float = 0.0


def _models(*, quick: bool) -> list[Model]:
    small = [_small(name, (0.7,) if quick else SHARES) for name in (("gpt", "tree") if quick else LAYERS)]
    return small + [_ordinary(name, (0.7,) if quick else (0.9, 0.7)) for name in ORDINARY[: 0 if quick else None]]


def _small(name: str, shares: tuple[float, ...]) -> Model:
    job = Job(ROOT / "tests" / "policies" / "jobs" / f"{name}.py", ("--steps", "40"))
    return Model(name, job, LAYERS[name], shares, 32)


def _ordinary(name: str, shares: tuple[float, ...]) -> Model:
    job = Job(JOBS / "ordinary.py", (name, "--steps", "24"))
    return Model(f"{name}, larger", job, LAYERS[name], shares, 12, is_ordinary=True)


def measure(folder: Path, *, quick: bool) -> Section:
    """Records every job plain and within budgets of shares of its peak, as many processes one after the other."""
    outcomes: list[Outcome] = []
    refused: list[tuple[str, ...]] = []
    late: list[str] = []
    for model in _models(quick=quick):
        base = folder / "base.memprof"
        printed = run(model.job.recorded(base, skip=model.skip), folder, **ONE_THREAD).stdout
        step = _steady(base, model)
        for share in model.shares:
            try:
                outcomes.append(_within(model, f"{share:.0%}", step, int(peak_bytes(step) * share), printed, folder))
            except RuntimeError as error:
                least = _least_share(step)
                sentence = reason_of(error).partition(" at once")[0]
                refused.append((model.title, f"{share:.0%}", *["-"] * 5, f"{sentence}; predicted least {least:.0%}"))
        if model.layers and not quick:
            beside = _beside_checkpoint(model, step, printed, folder)
            outcomes += beside
            if len(beside) > 1 and beside[1].slowdown > beside[0].slowdown:
                late.append(model.title)
    planned = _planned(folder, quick=quick)
    small = run_for_json([sys.executable, str(JOBS / "many_operators.py")], folder, PYTHONPATH=str(ROOT))
    mode_us, all_us = ((small[key] - small["plain_us"]) / small["operators"] for key in ("mode_us", "remat_us"))
    over = max(outcome.over for outcome in outcomes)
    equal = sum(outcome.is_equal for outcome in outcomes)
    overhead = max((outcome.overhead for outcome in outcomes), default=0.0)
    errors = sorted(abs(outcome.share_error) for outcome in outcomes if outcome.share_error is not None)
    bar = (
        "peak within the budget; losses equal to the bit; recomputed share within 1 point; "
        f"{OPERATOR_BAR_US:.0f} us an operator; larger models {TIME_BAR} x what recomputation explains; never slower "
        "than checkpointing at its peak"
    )
    text = (
        f"{over:.4f}; {equal} of {len(outcomes)}; {sum(error <= SHARE_BAR for error in errors)} of {len(errors)}, "
        f"worst {errors[-1]:.1%}; {all_us - mode_us:.1f} us besides torch's {mode_us:.1f}; {overhead:.2f} x; "
        f"slower: {', '.join(late) or 'none'}"
    )
    passed = over <= 1 and equal == len(outcomes) and errors[-1] <= SHARE_BAR and all_us - mode_us <= OPERATOR_BAR_US
    passed &= overhead <= TIME_BAR and not late
    rows = (*(outcome.row for outcome in outcomes), *refused)
    return Section(
        "Memory cap enforced by remat",
        "Jobs of tests/policies/jobs under `memprof record --remat`, one thread; step times are over the plain step, "
        "without the recorder. Operators of the small jobs take 10 to 60 us, those of the larger ones milliseconds. "
        "Last columns: activation checkpointing of all repeated layers, and remat with its peak as the budget. "
        f"Time an operator: of {small['operators']:,} on 32 numbers.",
        ("model", "budget", "peak / budget", "losses", "step time", "recomputed", "recomputed work", "predicted"),
        (*rows, ("resnet, planned", "70%", *["-"] * 5, planned)),
        Bar(bar, text, passed=passed),
        brief=brief_of(rows),
    )


def brief_of(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns a row for each model: budgets that were kept and refused, and the times beside checkpointing."""
    short = []
    for model in dict.fromkeys(row[0] for row in rows):
        own = {row[1]: row for row in rows if row[0] == model}
        kept = [row for budget, row in own.items() if row[2] != "-" and "checkpoint" not in budget]
        refused = [budget for budget, row in own.items() if row[2] == "-"]
        times = "; ".join(f"{row[4]} at {row[1]}" for row in kept)
        beside = [next((row[4] for budget, row in own.items() if budget.startswith(way)), "") for way in _BESIDE]
        peak = max((row[2] for row in kept), default="")
        short.append((model, times, ", ".join(refused) or "none", peak, *beside))
    return ("model", "step time", "refused", "highest peak / budget", *_BESIDE.values()), short


def _within(model: Model, title: str, step: Step, budget: int, printed: bytes, folder: Path) -> Outcome:
    head = folder / "head.memprof"
    done = run(model.job.recorded(head, "--remat", str(budget), skip=model.skip), folder, **ONE_THREAD)
    measured = _steady(head, model)
    trace = Trace.open(head)
    over = max(peak_bytes(trace.step(number)) for number in trace.recorded_steps) / budget
    work = _work(trace.step(step.number), step)
    try:
        predicted: float | None = _share(Remat(budget=str(budget)).transform(step))
        told = f"{predicted:.1%}"
    except PolicyError:
        predicted, told = None, "does not fit"
    is_equal = done.stdout == printed
    slowdown = measured.duration_us / step.duration_us
    losses, time = "equal" if is_equal else "DIFFER", f"{slowdown:.2f} x"
    row = (model.title, title, f"{over:.4f}", losses, time, f"{_share(measured):.1%}", f"{work:.1%}", told)
    overhead = slowdown / (1 + _share(measured)) if model.is_ordinary else 0.0
    return Outcome(row, over, is_equal, None if predicted is None else predicted - work, slowdown, overhead)


def _beside_checkpoint(model: Model, step: Step, printed: bytes, folder: Path) -> list[Outcome]:
    """Compares remat with checkpointing by layers, at the peak that the latter reaches."""
    head = folder / "checkpointed.memprof"
    done = run(model.job.recorded(head, "--checkpoint", model.layers, skip=model.skip), folder, **ONE_THREAD)
    checkpointed = _steady(head, model)
    peak = peak_bytes(checkpointed)
    title = f"{peak / peak_bytes(step):.0%}"
    slowdown = checkpointed.duration_us / step.duration_us
    losses, time = "equal" if done.stdout == printed else "DIFFER", f"{slowdown:.2f} x"
    row = (model.title, f"checkpoint: {title}", "1.0000", losses, time, f"{_share(checkpointed):.1%}", "-", "-")
    found = [Outcome(row, 1.0, done.stdout == printed, None, slowdown)]
    try:
        found.append(_within(model, f"as checkpoint: {title}", step, peak, printed, folder))
    except RuntimeError as error:
        refusal = reason_of(error).partition(" at once")[0]
        found[0] = replace(found[0], row=(*row[:-1], f"remat at this peak: {refusal}"))
    return found


def _planned(folder: Path, *, quick: bool) -> str:
    """Has the job run what planners' schedules make again, and says what came of it."""
    base, plan, head = folder / "resnet.memprof", folder / "remat.toml", folder / "planned.memprof"
    model = _small("resnet", ())
    run(model.job.recorded(base, skip=model.skip), folder, **ONE_THREAD)
    step = _steady(base, model)
    graph = graph_of(step)
    parts = []
    for planner in ("dtr",) if quick else ("checkmate", "dtr", "knapsack"):
        finding = find_plan(step, int(peak_bytes(step) * 0.7), planner=planner, time_limit_s=30)
        policy = None if finding.runs is None else remat_of(step, graph, finding.runs)
        if policy is None:
            parts.append(f"{planner}: {finding.status}")
            continue
        written, predicted = Plan((policy,)).predict(step, trace=base.name)
        write_plan(plan, written)
        run(model.job.recorded(head, "--plan", str(plan), skip=model.skip), folder, **ONE_THREAD)
        measured = _steady(head, model)
        parts.append(
            f"{planner}: schedule {finding.schedule_peak_bytes:,}, predicted {peak_bytes(predicted):,}, measured "
            f"{peak_bytes(measured):,} bytes, again {_share(predicted):.1%} predicted, {_share(measured):.1%} measured"
        )
    return "; ".join(parts)


def _steady(path: Path, model: Model) -> Step:
    """Returns the steady step of a recording.

    Raises:
        ValueError: The job ended before the steps that were to be recorded.
    """
    step = Trace.open(path).steady_step()
    if step.number < model.skip:
        raise ValueError(f"{path.name} holds step {step.number}: the job ended before step {model.skip}")
    return step


def _share(step: Step) -> float:
    """Returns the time of the operators that run again, as a share of that of all others."""
    took = np.nan_to_num(step.ops.duration_us)
    again = step.ops.is_recompute
    return float(took[again].sum() / took[~again].sum())


def _work(run: Step, plain: Step) -> float:
    """Returns the same with the times of a plain recording's operators, by operator and module, or operator alone."""
    took: dict[tuple[str, int], list[float]] = {}
    by_name: dict[str, list[float]] = {}
    for name, module, cost_us in zip(plain.ops.name, plain.ops.module_id, op_cost_us(plain), strict=True):
        took.setdefault((name, int(module)), []).append(float(cost_us))
        by_name.setdefault(name, []).append(float(cost_us))
    again = run.ops.take(run.ops.is_recompute)
    found = (
        took.get((name, int(module)), by_name[name]) for name, module in zip(again.name, again.module_id, strict=True)
    )
    return float(sum(np.mean(times) for times in found) / np.nan_to_num(plain.ops.duration_us).sum())


def _least_share(step: Step) -> float:
    """Returns the smallest share of the peak that the prediction holds, within half a percent."""
    low, high, peak = 0.0, 1.0, peak_bytes(step)
    while high - low > 0.005:
        middle = (low + high) / 2
        try:
            Remat(budget=str(int(peak * middle))).transform(step)
            high = middle
        except PolicyError:
            low = middle
    return high
