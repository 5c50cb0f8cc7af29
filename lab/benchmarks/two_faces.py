"""Does a run under a plan match the prediction from the run without it?"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from lab.benchmarks.recording import ROOT, Job, run
from lab.benchmarks.section import Section, verdict

JOBS = ROOT / "tests" / "policies" / "jobs"

#: The repeated part of each model, a part inside it, and how its loss is cut ("" where the logits are small).
MODELS = {
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
TIME_BAR = 0.10


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
    repeated, part, loss = MODELS[model]
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


def measure(folder: Path, *, quick: bool) -> Section:
    """Predicts each plan from the plain recording alone, writes the prediction down, then runs the job under it."""
    outcomes: list[Outcome] = []
    refused: list[tuple[str, Case, str]] = []
    for model in ("gpt", "resnet") if quick else MODELS:
        job = Job(JOBS / f"{model}.py", ("--steps", "1000"))
        base = folder / f"{model}.memprof"
        run(job.recorded(base, steps=2), folder, OMP_NUM_THREADS="1")
        for case in cases_of(model)[:: 5 if quick else 1]:
            try:
                outcomes.append(_try(job, model, case, base, folder))
            except RuntimeError as error:
                refused.append((model, case, str(error).strip().rpartition("memprof: ")[2]))
    times = statistics.median(abs(outcome.time_error) for outcome in outcomes)
    missed = [outcome for outcome in outcomes if abs(outcome.peak_error) > outcome.case.bar]
    rows = [_row(outcome) for outcome in outcomes]
    rows += [(model, case.name, "-", "-", sentence, "-", "-", "-") for model, case, sentence in refused]
    worst_peak = max(outcomes, key=lambda outcome: abs(outcome.peak_error))
    worst_time = max(outcomes, key=lambda outcome: abs(outcome.time_error))
    text = (
        f"checkpoint 0 bytes, swap and loss 1 %, others and combinations 3 %: {len(outcomes) - len(missed)} of "
        f"{len(outcomes)}; exact to the byte: {sum(outcome.error_bytes == 0 for outcome in outcomes)}; worst "
        f"{worst_peak.model}, {worst_peak.case.name}, {worst_peak.peak_error:+.2%}; median error of the step time "
        f"{times:.1%} (bar 10 %), worst {worst_time.model}, {worst_time.case.name}, {worst_time.time_error:+.0%}"
    )
    return Section(
        "Predicted against measured",
        "Peak of a steady step and its time, predicted from the recording of the plain job and written to a file "
        "before the run under the plan starts; one thread. Times are medians of the steps without the recorder.",
        ("model", "plan", "predicted peak", "measured peak", "error, bytes", "error", "predicted ms", "measured ms"),
        tuple(rows),
        verdict(text, passed=not missed and times <= TIME_BAR),
    )


def _try(job: Job, model: str, case: Case, base: Path, folder: Path) -> Outcome:
    plan, head = folder / "plan.toml", folder / "head.memprof"
    plan.unlink(missing_ok=True)
    memprof = [sys.executable, "-m", "memprof.cli.main"]
    run([*memprof, "predict", str(base), *case.flags, "--write", str(plan)], folder)
    command = job.recorded(head, steps=2)
    place = command.index("record") + 1
    run([*command[:place], "--plan", str(plan), *command[place:]], folder, OMP_NUM_THREADS="1")
    found = json.loads(run([*memprof, "verify", str(plan), str(head), "--json"], folder).stdout)
    predicted, measured = found["predicted"], found["measured"]
    return Outcome(
        model,
        case,
        predicted["peak_allocated_bytes"],
        measured["peak_allocated_bytes"],
        predicted["step_time_us"],
        measured["step_time_us"],
    )


def _row(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.model,
        outcome.case.name,
        f"{outcome.predicted_bytes:,}",
        f"{outcome.measured_bytes:,}",
        f"{outcome.error_bytes:+,}",
        f"{outcome.peak_error:+.2%}",
        f"{outcome.predicted_us / 1000:.1f}",
        f"{outcome.measured_us / 1000:.1f}",
    )
