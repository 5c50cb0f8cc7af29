"""Comparison with other planners, on four models and three budgets: which stay within them, and at what overhead?"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from lab.benchmarks.recording import JOBS, ONE_THREAD, Job, ask, environment, run, run_for_json
from lab.benchmarks.section import Bar, Section
from tests import truth

SCRIPT, PLANNERS = JOBS / "rivals.py", JOBS / "rival_plans.py"
MODELS = ("gpt", "vit", "resnet", "unet")
#: Budgets: these shares of what the plain job's peak has above its static state.
SHARES = (0.8, 0.6, 0.45)
#: Budgets of the compiler, for its own runs and for those that ours may choose from.
COMPILED = (1.0, *SHARES)
#: What the rivals need, installed in a folder of this benchmark alone.
PACKAGES = ("ckptplan==0.1.0rc1", "pulp==3.3.2", "pwlf==2.7.0")
#: The tools, as the table names them.
COLUMNS = ("every layer", "SAC planner (sac_ilp)", "ckptplan", "torch.compile", "memprof, checkpoint", "memprof")
#: Chunks of a chunked loss.
_CHUNKS = "8"
#: Steps at the beginning that do not count.
WARM_UP = 2


class RefusedError(Exception):
    """A rival cannot be had, or has no answer; the message is the reason."""


@dataclass
class Rival:
    """One way to run the job: its arguments, created on demand, and what was measured.

    Attributes:
        name: Name of the tool.
        plan: Returns the arguments, or raises; may set what it predicts.
        is_ours: Whether memprof planned it.
        predicted_bytes: Predicted peak; 0 where none is given.
        refused: The reason if the tool has no result, otherwise empty.
        arguments: The arguments.
        peak_bytes: Highest count of the allocator in a later step; 0 where the tool has no result.
        loss: Of the last step.
        ratios: Median step of a process over that of the plain job's process of the same round.
    """

    name: str
    plan: Callable[[Rival], tuple[str, ...]]
    is_ours: bool = False
    predicted_bytes: int = 0
    refused: str = ""
    arguments: tuple[str, ...] = ()
    peak_bytes: int = 0
    loss: float = 0.0
    ratios: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The step's time, as a multiple of the plain one's."""
        return statistics.median(self.ratios)


@dataclass(frozen=True)
class Budget:
    """One row: a model and a budget, and who competes for it, by column."""

    model: str
    share: float
    budget_bytes: int
    columns: tuple[tuple[Rival, ...], ...]

    def best(self, rivals: Sequence[Rival]) -> Rival | None:
        """Returns the fastest that fits, else the one nearest to the budget; None where none has a result."""
        measured = [rival for rival in rivals if rival.peak_bytes]
        fitting = [rival for rival in measured if self.fits(rival)]
        if fitting:
            return min(fitting, key=lambda rival: rival.ratio)
        return min(measured, key=lambda rival: rival.peak_bytes, default=None)

    def fits(self, rival: Rival) -> bool:
        """Returns whether a rival was measured within the budget."""
        return 0 < rival.peak_bytes <= self.budget_bytes

    def cell(self, rivals: Sequence[Rival]) -> str:
        """Shows the step's time, and for the one over the budget by how much."""
        best = self.best(rivals)
        if best is None:
            return "-"
        over = "" if self.fits(best) else f" at {best.peak_bytes / self.budget_bytes:.0%}"
        return f"{best.ratio:.2f}{over}"

    def is_won(self) -> bool:
        """Returns whether the fastest that fits is one of ours; ours also wins where nobody fits."""
        fitting = [rival for column in self.columns for rival in column if self.fits(rival)]
        best = min(fitting, key=lambda rival: rival.ratio, default=None)
        return best is None or best.is_ours


def measure(folder: Path, *, quick: bool) -> Section:
    """Measures each model under all plans for all budgets."""
    steps, rounds = (5, 1) if quick else (10, 3)
    budgets, plain_ms = [], []
    for model in MODELS[:1] if quick else MODELS:
        bench = Bench(folder, model, steps, search_s=10 if quick else 30)
        found, plain_us = _measure_model(bench, rounds)
        budgets += found
        plain_ms.append(f"{model} {plain_us / 1e3:.0f}")
    ours = {id(rival): rival for budget in budgets for column in budget.columns for rival in column if rival.is_ours}
    planned = [rival for rival in ours.values() if rival.peak_bytes]
    over = [
        rival.name
        for budget in budgets
        for column in budget.columns
        for rival in column
        if rival.is_ours and rival.peak_bytes and not budget.fits(rival)
    ]
    exact = sum(rival.peak_bytes == rival.predicted_bytes for rival in planned)
    won = sum(budget.is_won() for budget in budgets)
    return Section(
        "Comparison with other planners",
        f"Step time over the plain one ({', '.join(plain_ms)} ms), median of {rounds} rounds of processes; 'at 110%': "
        "peak above the budget, a share of what the plain peak has above parameters and AdamW's moments. "
        f"torch.compile: the fastest activation_memory_budget of {', '.join(f'{share:g}' for share in COMPILED)} that "
        "memprof: `suggest --allow checkpoint`, and `--forbid precision`. Torch's planner and ckptplan measure on CUDA "
        f"only, and are given times and bytes measured here. {', '.join(PACKAGES)}.",
        ("model, budget", *COLUMNS),
        [(f"{one.model}, {one.share:.0%}", *(one.cell(column) for column in one.columns)) for one in budgets],
        Bar(
            "never above the budget, and the fastest of all that fit",
            f"{len(planned) - len(over)} of {len(planned)}, {exact} as predicted to the byte; fastest in {won} of "
            f"{len(budgets)}",
            passed=not over and won == len(budgets),
        ),
    )


def _measure_model(bench: Bench, rounds: int) -> tuple[list[Budget], float]:
    """Plans for all budgets, then counts each run's peak, then times the runs in turn; and the plain step's time."""
    plain = Rival("plain", lambda _: ())
    bench.prepare(plain)
    if not plain.peak_bytes:
        raise RuntimeError(f"The plain {bench.model} has no result: {plain.refused}")
    layers = (Rival("every layer checkpointed", lambda _: ("--how", "layers")),)
    compiled = tuple(Rival(f"torch.compile at {share:g}", partial(_compiled, share=share)) for share in COMPILED)
    budgets = []
    for share in SHARES:
        size = int(bench.static_bytes + share * (plain.peak_bytes - bench.static_bytes))
        asked = (
            Rival("torch's SAC planner", partial(bench.ask, planner="autosac", budget=size)),
            Rival("ckptplan", partial(bench.ask, planner="ckptplan", budget=size)),
            Rival("memprof, checkpoint", partial(bench.suggest, budget=size, flags=("--allow", "checkpoint")), True),
            Rival("memprof", partial(bench.suggest, budget=size, flags=("--forbid", "precision"), runs=COMPILED), True),
        )
        columns = (layers, (asked[0],), (asked[1],), compiled, (asked[2],), (asked[3],))
        budgets.append(Budget(bench.model, share, size, columns))
    rivals = {id(rival): rival for budget in budgets for column in budget.columns for rival in column}
    for rival in rivals.values():
        bench.prepare(rival)
    plain_us = []
    for _ in range(rounds):
        medians = {key: bench.median_us(rival) for key, rival in rivals.items() if rival.peak_bytes}
        plain_us.append(bench.median_us(plain))
        for key, median in medians.items():
            rivals[key].ratios.append(median / plain_us[-1])
    return budgets, statistics.median(plain_us)


def _compiled(_: Rival, share: float) -> tuple[str, ...]:
    return ("--how", "inductor", "--activation-budget", str(share))


@dataclass
class Bench:
    """Runs what the rows of one model need.

    Attributes:
        folder: Where files go.
        model: Name of the model.
        steps: Steps of each process.
        search_s: Time limit of our searches, in seconds.
        static_bytes: Parameters, buffers and optimizer state, as the job counts them.
    """

    folder: Path
    model: str
    steps: int
    search_s: float
    static_bytes: int = 0
    _environment: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        # Compiled code is kept from a row's first process to its later ones, and compiled on one core.
        self._environment = {
            **ONE_THREAD,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
        }

    def prepare(self, rival: Rival) -> None:
        """Has a rival plan, runs the job once under that, and counts its true peak; a refusal is kept with it."""
        try:
            rival.arguments = (self.model, *rival.plan(rival), "--steps", str(self.steps))
            result = self._run(rival)
        except (RefusedError, RuntimeError) as error:
            rival.refused = _reason(str(error))
            print(f"{self.model}, {rival.name}: no result: {rival.refused}", file=sys.stderr)
            return
        self.static_bytes, rival.loss = result["static_bytes"], result["loss"]
        counted = truth.measure(SCRIPT, rival.arguments, environment(**self._environment))
        if counted.returncode:
            rival.refused = f"the counted run ended with {counted.returncode}"
            return
        rival.peak_bytes = counted.peak_bytes(WARM_UP, self.steps - WARM_UP)

    def median_us(self, rival: Rival) -> float:
        """Returns the median of a process's later steps."""
        return float(statistics.median(self._run(rival)["steps_us"][WARM_UP:]))

    def _run(self, rival: Rival) -> dict[str, Any]:
        result: dict[str, Any] = run_for_json(Job(SCRIPT, rival.arguments).command, self.folder, **self._environment)
        return result

    def suggest(
        self, rival: Rival, budget: int, flags: tuple[str, ...], runs: tuple[float, ...] = ()
    ) -> tuple[str, ...]:
        """Searches the fastest plan that fits.

        Args:
            rival: The row.
            budget: In bytes.
            flags: More options of suggest.
            runs: The job is recorded compiled with these budgets too, as plans to choose from; also with a
                chunked loss, where that applies.

        Raises:
            RefusedError: Nothing fits.
        """
        plan = self.folder / f"{self.model}-{budget}-{flags[-1]}.toml"
        compiled: list[str] = []
        for share, loss in itertools.product(runs, self._losses) if runs else ():
            compiled += ["--compiled", str(self._recorded(f".@{share}", loss))]
        asked = ("--budget", str(budget), *flags, *compiled, "--time-limit", str(self.search_s), "--write", str(plan))
        try:
            told = ask(self.folder, "suggest", str(self._recorded()), *asked, "-f")
        except RuntimeError as error:
            raise RefusedError("nothing fits") if "ended with 4" in str(error) else error from None
        rival.predicted_bytes = told["plans"][0]["peak_allocated_bytes"]
        print(f"{self.model}, {budget:,} bytes: {told['plans'][0]['describe']}", file=sys.stderr)
        return ("--how", "memprof", "--plan", str(plan))

    @cached_property
    def _losses(self) -> tuple[str, ...]:
        """How the loss of compiled runs is computed: "" as the job does, and in chunks where that applies."""
        try:
            ask(self.folder, "predict", str(self._recorded()), "--loss", _CHUNKS)
        except RuntimeError as error:
            if "ended with 2" in str(error):
                return ("",)
            raise
        return "", _CHUNKS

    def _recorded(self, compiled: str = "", loss: str = "") -> Path:
        """Records the plain job once, or under the compiler, and with a chunked loss."""
        path = self.folder / f"{self.model}{compiled}{loss and f'-loss-{loss}'}.memprof"
        if not path.exists():
            more = [*(("--compile", compiled) if compiled else ()), *(("--loss", loss) if loss else ())]
            job = Job(SCRIPT, (self.model, "--steps", str(self.steps)))
            run(job.recorded(path, *more, steps=2), self.folder, **self._environment)
        return path

    def ask(self, rival: Rival, planner: str, budget: int) -> tuple[str, ...]:
        """Runs another planner in a process that alone can import the packages it needs.

        Raises:
            RefusedError: It is not available or finds nothing.
        """
        others = self.folder / "others"
        if not others.exists():
            others.mkdir()
            # Without what they depend on: that is here.
            run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(others), *PACKAGES], others)
        plan = self.folder / f"{self.model}-{planner}-{budget}.json"
        asked = [self.model, "--planner", planner, "--budget", str(budget), "--write", str(plan)]
        run([sys.executable, str(PLANNERS), *asked], self.folder, **self._environment, PYTHONPATH=str(others))
        answer = json.loads(plan.read_text(encoding="utf-8"))
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        return ("--how", "planned", "--plan", str(plan))


def _reason(text: str) -> str:
    """Finds the line that says why a process failed: the last with an error's name, or else the last."""
    lines = text.strip().splitlines() or [""]
    named = [line for line in lines if re.match(r"(ERROR|[\w.]+(Error|Exception)):", line)]
    return (named or lines)[-1].rpartition("memprof: ")[2][:200]
