"""Compiled jobs: peaks of dry runs beside real ones, and compiled plans within their budgets beside torch's own."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.benchmarks.recording import JOBS, MEMPROF, ONE_THREAD, Job, environment, run, run_for_json
from lab.benchmarks.section import Bar, Section, describe_load, least_middle_most, middle_and_quartiles
from memprof.policies.plan.plan_file import read_plan
from memprof.trace.store import Trace
from tests import truth

SCRIPT, PAIR = JOBS / "compiled.py", JOBS / "compiled_pair.py"
#: The models whose forward is one graph, and all of them.
WHOLE = ("gpt", "vit", "resnet", "unet", "moe", "bert", "scan", "diffusion", "dynamic", "checkpointed")
MODELS = (*WHOLE[:-1], "breaks", WHOLE[-1], "lstm")
#: Models that are also planned for a budget: a share of the peak that they have uncompiled.
PLANNED = {"gpt": 0.75}
#: Shares of torch's budget that are run for every model, and further ones, by what they are above our plan's.
SHARES, ABOVE = (0.0, 0.5, 1.0), (0.0, 0.05, 0.1, 0.2)
STEPS, WARM_UP, BAR = 5, 2, 1.02
_NOTHING_FITS = "no plan fits"


def measure(folder: Path, *, quick: bool) -> Section:
    """Records each job compiled for real and in a dry run; plans some of them, and runs the plans."""
    rows, errors, over = [], [], []
    for model in MODELS[:2] if quick else MODELS:
        job = Job(SCRIPT, (model,))
        real, dry = folder / f"{model}-real.memprof", folder / f"{model}-dry.memprof"
        _record(job.recorded(real), real)
        _record(job.recorded(dry, "--dry-run"), dry)
        measured, predicted = _peaks(real, dry)
        errors.append(abs(predicted - measured) / measured)
        notes = [each for each in Trace.open(dry).manifest.notes if each.startswith("torch.compile")]
        note = (notes or ["not compiled"])[0]
        graphs = note.partition(": ")[2].partition(" compiled")[0] or note
        rows.append((model, graphs, f"{measured:,}", f"{predicted:,}", f"{errors[-1]:.3%}", "", "", ""))
        if model in PLANNED:
            budget, plan, peak = _planned(model, folder)
            over += [model] if peak > budget else []
            rows[-1] = (*rows[-1][:5], f"{budget:,}", plan, f"{peak:,}")
    median, worst = statistics.median(errors), max(errors)
    exact = [row for row in rows if row[2] == row[3]]
    return Section(
        "Compiled jobs",
        "Small models under torch.compile: peak of the same steps in a real recording, with inductor's kernels, and in "
        "a dry run, where only its generated Python code runs. Budgets are given to `memprof suggest --compile --allow "
        "compile` for the job without the compiler; the peak is that of a real run under the plan.",
        ("model", "graphs", "measured", "dry run", "error", "budget", "plan", "measured under it"),
        rows,
        Bar(
            "median error of the peak at most 2 %, plans within their budgets",
            f"{median:.3%}, worst {worst:.3%}, {len(rows)} models; {len(over)} over",
            passed=median <= 0.02 and not over,
        ),
        brief=(
            ("compared", "result"),
            [
                (f"dry run equal to the byte ({', '.join(row[0] for row in exact)})", f"{len(exact)} of {len(rows)}"),
                *((f"{row[0]} within {row[5]} B: {row[6]}", f"{row[7]} B") for row in rows if row[6]),
            ],
        ),
    )


def _planned(model: str, folder: Path) -> tuple[int, str, int]:
    """Returns a budget in bytes, the compiled plan found for it, and its peak in a real run."""
    job = Job(SCRIPT, (model, "--eager"))
    base, plan, head = (folder / f"{model}-{name}" for name in ("eager.memprof", "plan.toml", "head.memprof"))
    _record(job.recorded(base), base)
    budget = int(_peak(base) * PLANNED[model])
    _record(_search(base, budget, plan), plan)
    _record(job.recorded(head, "--plan", str(plan)), head)
    return budget, read_plan(plan).describe(), _peak(head)


def _search(base: Path, budget: int, plan: Path) -> list[str]:
    """Returns the command that searches a compiled plan for a job recorded without the compiler."""
    options = ("--budget", str(budget), "--compile", "--allow", "compile", "--write", str(plan))
    return [*MEMPROF, "suggest", str(base), *options]


def _record(command: list[str], path: Path, **changes: str) -> None:
    """Runs a command that writes a file, unless an earlier, stopped run has written it."""
    if not path.is_file():
        run(command, path.parent, **changes)


def _peaks(real: Path, dry: Path) -> tuple[int, int]:
    """Returns the peaks of the steps that both recorded."""
    steps, dry_steps = Trace.open(real).step_peaks(), Trace.open(dry).step_peaks()
    both = steps.keys() & dry_steps.keys()
    return max(steps[number] for number in both), max(dry_steps[number] for number in both)


def _peak(path: Path) -> int:
    return max(Trace.open(path).step_peaks().values())


@dataclass(frozen=True)
class Row:
    """A model, the plan found for a budget, and the share of torch's budget that it is compared with.

    Attributes:
        model: Name of the model.
        budget_bytes: Halfway between the model's lowest peak under torch's budget and that without one.
        plan: The plan's file.
        plan_peak_bytes: Its peak.
        share: The largest share of those tried whose peak is not above the plan's.
        share_peak_bytes: Its peak.
    """

    model: str
    budget_bytes: int
    plan: Path
    plan_peak_bytes: int
    share: float
    share_peak_bytes: int


class Bench:
    """Runs what one model needs; what an earlier, stopped run has left in the folder is used again."""

    def __init__(self, folder: Path, model: str) -> None:
        """Creates the folder."""
        self._folder = folder / f"compiled-time-{model}"
        self._folder.mkdir(exist_ok=True)
        self._model = model
        self._settings = {
            **ONE_THREAD,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        }

    def prepare(self) -> Row | str:
        """Finds the plan for the budget, and torch's share to compare it with; returns the reason if there is none."""
        peaks = {share: self._peak("--share", share) for share in SHARES}
        budget = (peaks[1.0] + min(peaks.values())) // 2
        plan = self._plan(budget)
        if isinstance(plan, str):
            return plan
        compile_ = next(policy for policy in read_plan(plan).policies if policy.name == "compile")
        lowest = compile_.activation_budget  # type: ignore[attr-defined]
        shares = [round(lowest + more, 2) for more in ABOVE]
        peaks |= {share: self._peak("--share", share) for share in shares if share <= 1}
        own = self._peak("--plan", plan)
        fitting = max(share for share, peak in peaks.items() if peak <= own)
        return Row(self._model, budget, plan, own, fitting, peaks[fitting])

    def times(self, row: Row, *, rounds: int) -> dict[str, list[float]]:
        """Returns what ``jobs/compiled_pair.py`` prints."""
        command = Job(PAIR, (row.model, "--plan", str(row.plan), "--share", str(row.share), "--rounds", str(rounds)))
        found: dict[str, list[float]] = self._once(
            f"times-{row.share}", lambda: run_for_json(command.command, self._folder, **self._settings)
        )
        return found

    def _plan(self, budget: int) -> Path | str:
        base, plan = self._folder / "eager.memprof", self._folder / f"{budget}.toml"
        _record(Job(SCRIPT, (self._model, "--eager")).recorded(base), base, **self._settings)
        try:
            _record(_search(base, budget, plan), plan, **self._settings)
        except RuntimeError as error:
            if "ended with 4" in str(error):
                return _NOTHING_FITS
            raise
        return plan if plan.is_file() else "fits as it is, uncompiled"

    def _peak(self, option: str, value: float | Path) -> int:
        """Returns the allocator's own highest count of the later steps of a run without a recorder."""
        arguments = (self._model, option, str(value))
        name = value.stem if isinstance(value, Path) else f"{value:g}"
        peak: int = self._once(f"peak-{option[2:]}-{name}", lambda: self._counted(arguments))
        return peak

    def _counted(self, arguments: tuple[str, ...]) -> int:
        counted = truth.measure(SCRIPT, arguments, environment(**self._settings))
        if counted.returncode:
            raise RuntimeError(f"compiled.py {' '.join(arguments)} ended with {counted.returncode}")
        return counted.peak_bytes(WARM_UP, STEPS - WARM_UP)

    def _once(self, name: str, find: Callable[[], Any]) -> Any:
        path = self._folder / f"{name}.json"
        if not path.is_file():
            path.write_text(json.dumps(find()), encoding="utf-8")
        return json.loads(path.read_text(encoding="utf-8"))


def compiled_time(folder: Path, *, quick: bool) -> Section:
    """Finds a plan and the share to compare it with for each model, then times both, step by step in turn."""
    rows, medians, over, missing = [], [], [], []
    found = {model: Bench(folder, model).prepare() for model in (WHOLE[:1] if quick else WHOLE)}
    load = describe_load()
    for model, row in found.items():
        if isinstance(row, str):
            missing += [model] if row == _NOTHING_FITS else []
            rows.append((model, "", row, "", "", "", "", "", ""))
            continue
        times = Bench(folder, model).times(row, rounds=2 if quick else 9)
        medians.append(statistics.median(times["ratio"]))
        over += [model] if row.plan_peak_bytes > row.budget_bytes else []
        sizes = f"{row.plan_peak_bytes:,}", f"{row.share:g}", f"{row.share_peak_bytes:,}"
        step_ms = f"{statistics.median(times['share']) / 1e3:.1f}"
        plan = read_plan(row.plan).describe()
        rows.append((model, f"{row.budget_bytes:,}", plan, *sizes, step_ms, *middle_and_quartiles(times["ratio"])))
    worst = max(medians, default=0.0)
    fits = [row for row in rows if not row[7]]
    return Section(
        "Time of compiled plans against torch's own budget",
        "Models whose forward is one graph. Budget: halfway between the peaks that torch's `activation_memory_budget` "
        f"reaches at {_listed(SHARES)}. Torch's share: the largest of these, the plan's own and those "
        f"{_listed(ABOVE[1:])} above it whose peak is at most the plan's. Ratio: step under the plan over step under "
        f"torch's share, in turn in one process, median and quartiles of 9 rounds. {load}",
        ("model", "budget", "plan", "its peak", "torch's share", "its peak", "its step, ms", "ratio", "quartiles"),
        rows,
        Bar(
            f"time at most {BAR} of torch's own at the same peak, a plan within its budget for every model",
            f"{worst:.3f}; {len(found) - len(missing)} of {len(found)}, {len(over)} over",
            passed=worst <= BAR and not over and not missing,
        ),
        brief=(
            ("model", "plan", "torch's share", "ratio", "quartiles"),
            [
                (row[0], row[2], row[4], *row[7:])
                for row in (*least_middle_most([row for row in rows if row[7]], 7), *fits)
            ],
        ),
    )


def _listed(shares: tuple[float, ...]) -> str:
    return ", ".join(f"{share:g}" for share in shares)
