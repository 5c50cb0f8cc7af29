"""Plans beside runs under them: whether suggested ones fit, whether predictions hold, and what ranks need."""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.benchmarks.recording import (
    MEMPROF,
    ONE_THREAD,
    ROOT,
    Job,
    ask,
    peak_bytes,
    reason_of,
    run,
    run_for_json,
    run_under,
    sample,
)
from lab.benchmarks.section import Bar, Section, bytes_in
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.shard.policy import Shard
from memprof.trace.step import Step
from memprof.trace.store import Trace

POLICY_JOBS = ROOT / "tests" / "policies" / "jobs"
#: Budgets, in per cent of the recorded peak.
SHARES = (90, 80, 70, 60, 50, 40, 30)
#: The repeated part of each model, a part inside it, and how its loss is cut ("" where the logits are small).
REPEATED = {
    "gpt": ("layers.*", "layers.*.mlp", "8,head"),
    "resnet": ("stages.*", "stages.1", ""),
    "lstm": ("layers.*", "layers.1", "8,predict"),
    "vit": ("encoder.blocks.*", "encoder.blocks.[0-1]", ""),
    "unet": ("down.*,up.*", "down.0", ""),
    "shared": ("mixer", "mixer.wide", "8,head"),
}
#: Highest error of the peak, as a share of the measured one, by kind of plan.
BARS = {"checkpoint": 0.0, "swap": 0.01, "loss": 0.01}
OTHER_BAR = 0.03
TIME_ERROR_BAR = 0.10
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
#: Jobs that are sharded, and the modules that are checkpointed.
LAYERS = {"gpt": "layers.*", "resnet": "stages.*"}
#: Columns and rows of a table that stands for a longer one.
Brief = tuple[tuple[str, ...], list[tuple[str, ...]]]
_LOSS = re.compile(r"step (\d+) loss ([0-9.]+)")  # the lines of two ranks may run into one another


def fits(folder: Path, *, quick: bool) -> Section:
    """Records each sample, asks for a plan at each budget, trains under it and compares."""
    rows, over, count = [], [], 0
    for model in ("gpt", "resnet", "lstm"):
        base, job = folder / f"{model}.memprof", sample(model)
        run(job.recorded(base), folder, **ONE_THREAD)
        for share in SHARES[:: 3 if quick else 1]:
            plan = folder / f"{model}-{share}.toml"
            try:
                told = ask(folder, "suggest", str(base), "--budget", f"{share}%", "--write", str(plan), "-f")
            except RuntimeError:
                rows.append((model, f"{share} %", "nothing fits", *[""] * 5))
                continue
            found = run_under(plan, job, folder)
            predicted, measured = found["predicted"], found["measured"]
            peak, budget = measured["peak_allocated_bytes"], told["budget_bytes"]
            count += 1
            over += [f"{model} at {share} %"] if peak > budget else []
            peaks = f"{predicted['peak_allocated_bytes']:,}", f"{peak:,}", f"{peak / budget:.1%}"
            times = (f"{(one['step_time_us'] or float('nan')) / 1e3:.1f}" for one in (predicted, measured))
            rows.append((model, f"{share} %", told["plans"][0]["describe"], *peaks, *times))
    text = f"{count - len(over)} of {count}" + (f"; not {', '.join(over)}" if over else "")
    return Section(
        "Suggested plans, applied",
        "The fastest plan that `memprof suggest` finds at budgets of 90 to 30 % of the recorded peak, and the job run "
        "under it, one thread.",
        ("model", "budget", "plan", "predicted peak", "measured peak", "of the budget", "predicted ms", "measured ms"),
        rows,
        Bar("measured peak within the budget", text, passed=not over),
        brief=brief_of_fits(rows),
    )


def brief_of_fits(rows: Sequence[tuple[str, ...]]) -> Brief:
    """Returns a row for each model: how many budgets have a plan, and how near the measured peaks came."""
    short = []
    for model in dict.fromkeys(row[0] for row in rows):
        found = [row for row in rows if row[0] == model and row[3]]
        errors = [bytes_in(row[3]) / bytes_in(row[4]) - 1 for row in found]
        counts = f"{len(found)} of {sum(row[0] == model for row in rows)}", f"{errors.count(0)}"
        fullest = max(found, key=lambda row: float(row[5].rstrip("%")))[5]
        short.append((model, *counts, f"{max(errors, key=abs):+.1%}", fullest))
    return ("model", "plans found", "predicted to the byte", "largest error", "fullest, of its budget"), short


@dataclass(frozen=True)
class Case:
    """One plan: its policies' flags, and the bar it is held to."""

    name: str
    flags: tuple[str, ...]
    bar: float


@dataclass(frozen=True)
class Outcome:
    """Predicted and measured: peaks in bytes, times in microseconds."""

    model: str
    case: Case
    predicted_bytes: int
    measured_bytes: int
    predicted_us: float
    measured_us: float

    @property
    def error_bytes(self) -> int:
        """How much too high the predicted peak is."""
        return self.predicted_bytes - self.measured_bytes

    @property
    def peak_error(self) -> float:
        """The same as a share of the measured peak."""
        return self.error_bytes / self.measured_bytes

    @property
    def time_error(self) -> float:
        """How much too long the predicted step is, as a share of the measured one."""
        return self.predicted_us / self.measured_us - 1


def cases_of(model: str) -> list[Case]:
    """Lists the plans a model is tried under."""
    repeated, part, loss = REPEATED[model]
    single = {
        "checkpoint, the repeated part": ["--checkpoint", repeated],
        "checkpoint, a part of it": ["--checkpoint", part],
        "checkpoint, keep matmul and conv": ["--checkpoint", f"{repeated} keep=matmul,conv"],
        "precision bf16": ["--precision", "bf16"],
        "precision pure bf16": ["--precision", "pure-bf16"],
        "swap to disk": ["--swap", f"{repeated}:disk"],
        "accumulate 2": ["--accumulate", "2"],
        "accumulate 4": ["--accumulate", "4"],
        "optimizer in backward": ["--optimizer", "in-backward"],
        "optimizer foreach": ["--optimizer", "foreach"],
        "loss in 8 chunks": ["--loss", loss],
        "compress": ["--compress", repeated],
    }
    together = {
        "checkpoint + bf16": [*single["checkpoint, the repeated part"], *single["precision bf16"]],
        "checkpoint + accumulate 2": [*single["checkpoint, the repeated part"], *single["accumulate 2"]],
        "checkpoint + in backward + loss": [
            *single["checkpoint, the repeated part"],
            *single["optimizer in backward"],
            *single["loss in 8 chunks"],
        ],
        "checkpoint a part + swap to disk": [*single["checkpoint, a part of it"], *single["swap to disk"]],
    }
    if not loss:
        del single["loss in 8 chunks"], together["checkpoint + in backward + loss"]
    alone = [
        Case(name, tuple(flags), BARS.get(flags[0].removeprefix("--"), OTHER_BAR)) for name, flags in single.items()
    ]
    return [*alone, *(Case(name, tuple(flags), OTHER_BAR) for name, flags in together.items())]


def two_faces(folder: Path, *, quick: bool) -> Section:
    """Predicts each plan from the plain recording alone, writes the prediction down, then runs the job under it."""
    outcomes: list[Outcome] = []
    refused: list[tuple[str, Case, str]] = []
    for model in ("gpt", "resnet") if quick else REPEATED:
        job = Job(POLICY_JOBS / f"{model}.py", ("--steps", "40"))
        base = folder / f"{model}.memprof"
        run(job.recorded(base, steps=2), folder, **ONE_THREAD)
        for case in cases_of(model)[:: 5 if quick else 1]:
            try:
                outcomes.append(_try(job, model, case, base, folder))
            except RuntimeError as error:
                refused.append((model, case, reason_of(error)))
    times = statistics.median(abs(outcome.time_error) for outcome in outcomes)
    missed = [outcome for outcome in outcomes if abs(outcome.peak_error) > outcome.case.bar]
    rows = [_row(outcome) for outcome in outcomes]
    rows += [(model, case.name, "-", "-", sentence, "-", "-", "-") for model, case, sentence in refused]
    worst_peak = max(outcomes, key=lambda outcome: abs(outcome.peak_error))
    worst_time = max(outcomes, key=lambda outcome: abs(outcome.time_error))
    text = (
        f"{len(outcomes) - len(missed)} of {len(outcomes)}, {sum(outcome.error_bytes == 0 for outcome in outcomes)} to "
        f"the byte, worst {worst_peak.peak_error:+.2%} ({worst_peak.model}, {worst_peak.case.name}); times "
        f"{times:.1%}, worst {worst_time.time_error:+.0%} ({worst_time.model}, {worst_time.case.name})"
    )
    return Section(
        "Predicted against measured",
        "Peak and time of a steady step, predicted from the plain job's recording before the run under the plan; six "
        "models, one thread.",
        ("model", "plan", "predicted peak", "measured peak", "error, bytes", "error", "predicted ms", "measured ms"),
        rows,
        Bar(
            "peaks: checkpoint 0 bytes, swap and loss 1 %, others 3 %; median error of step times 10 %",
            text,
            passed=not missed and times <= TIME_ERROR_BAR,
        ),
        brief=brief_of_faces(rows),
    )


def brief_of_faces(rows: Sequence[tuple[str, ...]]) -> Brief:
    """Returns a row for each policy, and one for their combinations."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        if row[2] != "-":
            kind = "combinations" if " + " in row[1] else row[1].split()[0].rstrip(",")
            groups.setdefault(kind, []).append(row)
    short = []
    for kind, found in groups.items():
        peak = max((float(row[5].rstrip("%")) for row in found), key=abs)
        late = statistics.median(abs(float(row[6]) / float(row[7]) - 1) for row in found)
        exact = sum(row[4] == "+0" for row in found)
        short.append((kind, f"{len(found)}", f"{exact}", f"{peak:+.2f} %", f"{100 * late:.0f} %"))
    return ("policy", "plans", "to the byte", "largest error", "median error of the time"), short


def _try(job: Job, model: str, case: Case, base: Path, folder: Path) -> Outcome:
    plan = folder / "plan.toml"
    plan.unlink(missing_ok=True)
    run([*MEMPROF, "predict", str(base), *case.flags, "--write", str(plan)], folder)
    found = run_under(plan, job, folder, steps=2)
    peaks = (found[side]["peak_allocated_bytes"] for side in ("predicted", "measured"))
    times = (found[side]["step_time_us"] for side in ("predicted", "measured"))
    return Outcome(model, case, *peaks, *times)


def _row(outcome: Outcome) -> tuple[str, ...]:
    peaks = f"{outcome.predicted_bytes:,}", f"{outcome.measured_bytes:,}", f"{outcome.error_bytes:+,}"
    times = f"{outcome.predicted_us / 1000:.1f}", f"{outcome.measured_us / 1000:.1f}"
    return (outcome.model, outcome.case.name, *peaks, f"{outcome.peak_error:+.2%}", *times)


@dataclass(frozen=True)
class Ran:
    """One job on some ranks.

    Attributes:
        step: The steady step of the rank with the highest peak.
        peak: That peak.
        losses: For each step, the sum of the ranks' printed losses.
    """

    step: Step
    peak: int
    losses: tuple[float, ...]


def sharding(folder: Path, *, quick: bool) -> Section:
    """Runs every strategy on 2 and 4 gloo processes, with and without checkpoints, and compares with its prediction."""
    rows, worst = [], 0.0
    jobs = dict(list(LAYERS.items())[:1]) if quick else LAYERS
    for job, layers in jobs.items():
        base = _run_on(job, folder, 1)
        for ranks in (2,) if quick else (2, 4):
            for checkpoint in (False,) if quick else (False, True):
                more = (Checkpoint((layers,)),) if checkpoint else ()
                reference: tuple[float, ...] = ()
                for stage, strategy in enumerate(STRATEGIES):
                    flags = ("--shard", f"{strategy}:{ranks}", *(("--checkpoint", layers) if checkpoint else ()))
                    ran = _run_on(job, folder, ranks, *flags)
                    reference = reference or ran.losses
                    assert ran.losses, "the job printed no loss"
                    start = time.perf_counter()
                    predicted = Plan((Shard(stage, ranks), *more)).transform(base.step)
                    seconds = time.perf_counter() - start
                    peak = peak_bytes(predicted)
                    error = (peak - ran.peak) / ran.peak
                    worst = max(worst, abs(error))
                    drift = max(abs(np.array(ran.losses) - np.array(reference)), default=0.0) / ranks
                    title = f"{job}, {strategy} over {ranks}{', ' + layers + ' checkpointed' if checkpoint else ''}"
                    sizes = f"{peak:,}", f"{ran.peak:,}", f"{error:+.3%}"
                    rows.append((title, *sizes, f"{drift:.1e}", f"{seconds * 1e3:.0f} ms"))
    rows.append(_tracked(folder))
    return Section(
        "Sharding",
        "A rank's peak, predicted from a recording of one process, against the highest of 2 and 4 gloo processes "
        "(`memprof record --shard`), GPT and ResNet, with and without checkpoints; losses against ddp's on the same "
        "ranks. The last row is torch's own FSDPMemTracker on the GPT.",
        ("job", "predicted", "measured", "error", "losses", "took"),
        rows,
        Bar("every peak within 3 %", f"{worst:.3%} at most, {len(rows) - 1} jobs", passed=worst <= 0.03),
        brief=brief_of_sharding(rows),
    )


def brief_of_sharding(rows: Sequence[tuple[str, ...]]) -> Brief:
    """Returns a row for each strategy: its largest errors, in bytes and as a share, and how far losses differ."""
    short = []
    *ours, theirs = rows
    for strategy in STRATEGIES:
        found = [row for row in ours if f" {strategy} over" in row[0]]
        errors = [bytes_in(row[1]) - bytes_in(row[2]) for row in found]
        share = max((row[3] for row in found), key=lambda cell: abs(float(cell.rstrip("%"))))
        losses = max(float(row[4]) for row in found)
        short.append((strategy, f"{len(found)}", f"{max(errors, key=abs):+,} B", share, f"{losses:g}"))
    off = f"{bytes_in(theirs[1]) - bytes_in(theirs[2]):+,} B", theirs[3]
    return ("strategy", "jobs", "largest error", "as a share", "losses differ by"), [*short, (theirs[0], "1", *off, "")]


def _run_on(job: str, folder: Path, ranks: int, *flags: str) -> Ran:
    path = folder / f"{job}.memprof"
    # The job's loader has eight batches, of which each rank takes its share.
    window = ("--skip", "0" if ranks > 2 else "1", "--steps", "2")
    command = [sys.executable, "-m", "memprof", "record", "-f", "-o", str(path), *flags, *window, "-m", job]
    done = run(command, POLICY_JOBS, **ONE_THREAD)
    steps = [Trace.open(path, rank).steady_step() for rank in range(ranks)]
    peaks = [peak_bytes(step) for step in steps]
    losses: dict[int, float] = {}
    for number, loss in _LOSS.findall(done.stdout.decode()):
        losses[int(number)] = losses.get(int(number), 0.0) + float(loss)
    return Ran(steps[int(np.argmax(peaks))], max(peaks), tuple(losses[number] for number in sorted(losses)))


def _tracked(folder: Path) -> tuple[str, ...]:
    """Compares with torch's own tracker."""
    measured = _run_on("gpt", folder, 2, "--shard", "fsdp:2").peak
    title, command = "FSDPMemTracker, gpt, fsdp over 2", [sys.executable, "-m", "lab.benchmarks.jobs.fsdp_tracked"]
    try:
        found = run_for_json(command, ROOT, **ONE_THREAD)
    except RuntimeError as error:
        return (title, f"it failed: {str(error).splitlines()[-1][:80]}", "", "", "", "")
    sizes = f"{found['peak']:,}", f"{measured:,}", f"{(found['peak'] - measured) / measured:+.3%}"
    return (title, *sizes, "", f"{found['seconds'] * 1e3:.0f} ms")
