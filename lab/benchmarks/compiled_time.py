"""Are compiled plans for a budget in bytes as fast as torch's own budget at the same peak?"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.benchmarks.machine import describe_load
from lab.benchmarks.recording import JOBS, Job, environment, run, run_for_json
from lab.benchmarks.section import Section, verdict
from memprof.policies.plan.plan_file import read_plan
from tests import truth

#: The models of the table of compiled jobs whose forward is one graph.
MODELS = ("gpt", "vit", "resnet", "unet", "moe", "bert", "scan", "diffusion", "dynamic", "checkpointed")
#: Shares of torch's budget that are run for every model, and further ones, by what they are above our plan's.
SHARES, ABOVE = (0.0, 0.5, 1.0), (0.0, 0.05, 0.1, 0.2)
MEMPROF = [sys.executable, "-m", "memprof.cli.main"]
SCRIPT, PAIR = JOBS / "compiled.py", JOBS / "compiled_pair.py"
STEPS, WARM_UP = 5, 2
BAR = 1.02
_NOTHING_FITS = "no plan fits"


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
            "OMP_NUM_THREADS": "1",
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
        if not base.is_file():
            run(Job(SCRIPT, (self._model, "--eager")).recorded(base), self._folder, **self._settings)
        asked = ["suggest", str(base), "--budget", str(budget), "--compile", "--allow", "compile", "--write", str(plan)]
        if not plan.is_file():
            try:
                run([*MEMPROF, *asked], self._folder, **self._settings)
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


def measure(folder: Path, *, quick: bool) -> Section:
    """Finds a plan and the share to compare it with for each model, then times both, step by step in turn."""
    rows, medians, over, missing = [], [], [], []
    found = {model: Bench(folder, model).prepare() for model in (MODELS[:1] if quick else MODELS)}
    load = describe_load()
    for model, row in found.items():
        if isinstance(row, str):
            missing += [model] if row == _NOTHING_FITS else []
            rows.append((model, "", row, "", "", "", "", "", ""))
            continue
        times = Bench(folder, model).times(row, rounds=2 if quick else 9)
        low, middle, high = statistics.quantiles(times["ratio"], n=4)
        medians.append(middle)
        over += [model] if row.plan_peak_bytes > row.budget_bytes else []
        rows.append(
            (
                model,
                f"{row.budget_bytes:,}",
                read_plan(row.plan).describe(),
                f"{row.plan_peak_bytes:,}",
                f"{row.share:g}",
                f"{row.share_peak_bytes:,}",
                f"{statistics.median(times['share']) / 1e3:.1f}",
                f"{middle:.3f}",
                f"{low:.3f} to {high:.3f}",
            )
        )
    worst = max(medians, default=0.0)
    text = (
        f"time at most {BAR} of torch's own at the same peak (worst {worst:.3f}), each plan within its budget, "
        f"a plan for every model ({len(found) - len(missing)} of {len(found)})"
    )
    return Section(
        "Time of compiled plans against torch's own budget",
        "The models of the table above whose forward is one graph. Budget: halfway between the lowest peak that "
        f"torch's `activation_memory_budget` reached at {_listed(SHARES)}, and its peak at 1. Plan: "
        "that of `memprof suggest --compile --allow compile` for the job without the compiler. Torch's share: the "
        f"largest, of these, the plan's own and those {_listed(ABOVE[1:])} above it, whose peak is at most the plan's. "
        "Peaks: the "
        "CPU allocator's own log of runs without a recorder, later steps. Ratio: step under the plan over step under "
        "torch's share, both in one process, on one thread, in turn at every step; median of the pairs of each of 9 "
        f"rounds, then median and quartiles over rounds. {load}",
        ("model", "budget", "plan", "its peak", "torch's share", "its peak", "its step, ms", "ratio", "quartiles"),
        tuple(rows),
        verdict(text, passed=worst <= BAR and not over and not missing),
    )


def _listed(shares: tuple[float, ...]) -> str:
    return ", ".join(f"{share:g}" for share in shares)
