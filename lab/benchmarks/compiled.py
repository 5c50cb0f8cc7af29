"""Are the peaks of compiled jobs predicted by dry runs, and do plans that compile keep their budgets in bytes?"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from lab.benchmarks.recording import JOBS, Job, run
from lab.benchmarks.section import Section, verdict
from memprof.policies.plan.plan_file import read_plan
from memprof.trace.store import Trace

MODELS = (
    "gpt",
    "vit",
    "resnet",
    "unet",
    "moe",
    "bert",
    "scan",
    "diffusion",
    "dynamic",
    "breaks",
    "checkpointed",
    "lstm",
)
#: Models that are also planned for a budget: a share of the peak that they have uncompiled.
PLANNED = {"gpt": 0.75}
MEMPROF = [sys.executable, "-m", "memprof.cli.main"]


def measure(folder: Path, *, quick: bool) -> Section:
    """Records each job compiled for real and in a dry run; plans some of them, and runs the plans."""
    rows, errors, over = [], [], []
    for model in MODELS[:2] if quick else MODELS:
        job = Job(JOBS / "compiled.py", (model,))
        real, dry = folder / f"{model}-real.memprof", folder / f"{model}-dry.memprof"
        _record(job.recorded(real), real)
        _record(_with(job.recorded(dry), "--dry-run"), dry)
        measured, predicted = _peaks(real, dry)
        errors.append(abs(predicted - measured) / measured)
        note = next(
            (each for each in Trace.open(dry).manifest.notes if each.startswith("torch.compile")), "not compiled"
        )
        graphs = note.partition(": ")[2].partition(" compiled")[0] or note
        rows.append((model, graphs, f"{measured:,}", f"{predicted:,}", f"{errors[-1]:.3%}", "", "", ""))
        if model in PLANNED:
            budget, plan, peak = _planned(model, folder)
            over += [model] if peak > budget else []
            rows[-1] = (*rows[-1][:5], f"{budget:,}", plan, f"{peak:,}")
    median, worst = statistics.median(errors), max(errors)
    text = f"median error of the peak at most 2%: {median:.3%} (worst {worst:.3%}); plans within their budgets"
    return Section(
        "Compiled jobs",
        "Small models under torch.compile: peak of the same steps in a real recording, with inductor's kernels, "
        "and in a dry run, where only its generated Python code runs. Graphs: forwards and backwards compiled. Budget: "
        "given to `memprof suggest --compile --allow compile` for the job as it is without the compiler; the peak "
        "beside its plan is that of a real run under it.",
        ("model", "graphs", "measured", "dry run", "error", "budget", "plan", "measured under it"),
        tuple(rows),
        verdict(text, passed=median <= 0.02 and not over),
    )


def _planned(model: str, folder: Path) -> tuple[int, str, int]:
    """Returns a budget in bytes, the compiled plan found for it, and its peak in a real run."""
    job = Job(JOBS / "compiled.py", (model, "--eager"))
    base, plan, head = (folder / f"{model}-{name}" for name in ("eager.memprof", "plan.toml", "head.memprof"))
    _record(job.recorded(base), base)
    budget = int(_peak(base) * PLANNED[model])
    asked = ["suggest", str(base), "--budget", str(budget), "--compile", "--allow", "compile", "--write", str(plan)]
    _record([*MEMPROF, *asked], plan)
    _record(_with(job.recorded(head), "--plan", str(plan)), head)
    return budget, read_plan(plan).describe(), _peak(head)


def _record(command: list[str], path: Path) -> None:
    """Runs a command that writes a file, unless an earlier, stopped run has written it."""
    if not path.is_file():
        run(command, path.parent)


def _with(command: list[str], *options: str) -> list[str]:
    place = command.index("record") + 1
    return [*command[:place], *options, *command[place:]]


def _peaks(real: Path, dry: Path) -> tuple[int, int]:
    """Returns the peaks of the steps that both recorded."""
    steps, dry_steps = Trace.open(real).step_peaks(), Trace.open(dry).step_peaks()
    both = steps.keys() & dry_steps.keys()
    return max(steps[number] for number in both), max(dry_steps[number] for number in both)


def _peak(path: Path) -> int:
    return max(Trace.open(path).step_peaks().values())
