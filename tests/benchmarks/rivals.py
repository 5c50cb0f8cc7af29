"""Comparison with other planners, on one GPT and one budget: which stay within it, and at what overhead?"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from memprof.units import format_bytes
from tests import truth
from tests.benchmarks.recording import JOBS, Job, environment, run
from tests.benchmarks.section import Section, verdict

SCRIPT, PLANNERS = JOBS / "rivals.py", JOBS / "rival_plans.py"
MEMPROF = (sys.executable, "-m", "memprof.cli.main")
#: Budget: this share of what the plain job's peak has above its static state.
SHARE = 0.6
#: What the rivals need, installed in a folder of this benchmark alone.
PACKAGES = ("ckptplan==0.1.0rc1", "pulp==3.3.2", "pwlf==2.7.0")
OURS = "memprof suggest"
#: Compiled runs that ours may choose from: the compiler's budgets.
COMPILED = (1.0, SHARE)
#: Steps at the beginning that do not count.
WARM_UP = 2


class RefusedError(Exception):
    """A rival cannot be had, or has no answer; the message is the reason."""


@dataclass
class Rival:
    """One row: the job's arguments, created on demand, and what was measured.

    Attributes:
        name: Name of the tool.
        plan: Returns the arguments, or raises; may add to the note.
        note: What it did.
        peak_bytes: Highest count of the allocator in a later step; 0 where the tool has no result.
        loss: Of the last step.
        ratios: Median step of a process over that of the plain job's process of the same round.
    """

    name: str
    plan: Callable[[Rival], tuple[str, ...]]
    note: str = ""
    arguments: tuple[str, ...] = ()
    peak_bytes: int = 0
    loss: float = 0.0
    ratios: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The step's time, as a multiple of the plain one's."""
        return statistics.median(self.ratios)


def measure(folder: Path, *, quick: bool) -> Section:
    """Plans everything, then counts each row's peak, then times the rows in turn."""
    steps, rounds = (5, 1) if quick else (14, 5)
    bench = Bench(folder, steps, search_s=10 if quick else 60)
    plain = Rival("plain", lambda _: ())
    bench.prepare(plain)
    if not plain.peak_bytes:
        raise RuntimeError(f"The plain job has {plain.note}")
    static = bench.static_bytes
    budget = int(static + SHARE * (plain.peak_bytes - static))
    rivals = [plain, *_rivals(bench, budget)]
    for rival in rivals[1:]:
        bench.prepare(rival)
    measured = [rival for rival in rivals if rival.peak_bytes]
    plain_us = []
    for _ in range(rounds):
        medians = {rival.name: bench.median_us(rival) for rival in measured}
        plain_us.append(medians[plain.name])
        for rival in measured:
            rival.ratios.append(medians[rival.name] / medians[plain.name])
    plain.note = f"{statistics.median(plain_us) / 1e3:.0f} ms per step"
    return Section(
        "Comparison with other planners",
        "A GPT of 4 layers (width 256, 4 heads, 128 tokens, batch 8, 5,000 words, AdamW) on one thread, each row in "
        "its own processes. Static state is the parameters and AdamW's moments, "
        f"{format_bytes(static)} (without gradients, which are freed before each forward); the plain peak is "
        f"{format_bytes(plain.peak_bytes - static)} above it, the budget {SHARE:.0%} of that: "
        f"{budget:,} bytes in all. True peak: the CPU allocator's own log of a run without a recorder, later steps. "
        "Time: median of a process's later steps over that of the plain process of the same round; median of "
        f"{rounds} rounds. Torch's planner and ckptplan measure on CUDA only, so they are given operator times and "
        "bytes of each block measured here in the same way; the optimizer's state, which torch's does not count, is "
        f"subtracted from its budget. Packages: {', '.join(PACKAGES)}.",
        ("who", "true peak", "above static, of plain's", "of the budget", "step time", "loss", "note"),
        tuple(_row(rival, plain, static, budget) for rival in rivals),
        _bar(plain, rivals[1:], budget),
    )


def _rivals(bench: Bench, budget: int) -> Iterator[Rival]:
    yield Rival("every layer checkpointed", lambda _: ("--how", "layers"))
    for name, flags in {
        "checkpoint only": ("--allow", "checkpoint"),
        "all default policies but precision": ("--forbid", "precision"),
        "all default policies": (),
    }.items():
        yield Rival(f"{OURS}, {name}", partial(bench.suggest, budget=budget, flags=flags))
    compiling = partial(bench.suggest, budget=budget, flags=("--allow", "checkpoint,compile"), compiled=COMPILED)
    yield Rival(f"{OURS}, checkpoint and compiled runs", compiling)
    yield Rival("torch's SAC planner (sac_ilp)", partial(bench.ask, planner="autosac", budget=budget))
    yield Rival("ckptplan, dynamic programming", partial(bench.ask, planner="ckptplan", budget=budget))
    compiled = ("--how", "inductor", "--activation-budget")
    yield Rival(f"torch.compile, activation_memory_budget={SHARE}", lambda _: (*compiled, str(SHARE)))
    yield Rival("torch.compile", lambda _: (*compiled, "1.0"))


@dataclass
class Bench:
    """Runs what the rows need.

    Attributes:
        folder: Where files go.
        steps: Steps of each process.
        search_s: Time limit of our searches, in seconds.
        static_bytes: Parameters and optimizer state, as the job counts them.
    """

    folder: Path
    steps: int
    search_s: float
    static_bytes: int = 0
    _environment: dict[str, str] = field(init=False)
    _without: str = ""

    def __post_init__(self) -> None:
        # Compiled code is kept from a row's first process to its later ones, and compiled on one core.
        self._environment = {
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
        }

    def prepare(self, rival: Rival) -> None:
        """Has a rival plan, runs the job once under that, and counts its true peak; a refusal becomes its note."""
        try:
            rival.arguments = (*rival.plan(rival), "--steps", str(self.steps))
            result = self._run(rival)
        except (RefusedError, RuntimeError) as error:
            rival.note = f"no result: {_reason(str(error))}"
            return
        self.static_bytes, rival.loss = result["static_bytes"], result["loss"]
        counted = truth.measure(SCRIPT, rival.arguments, environment(**self._environment))
        if counted.returncode:
            rival.note = f"no result: the counted run ended with {counted.returncode}"
            return
        rival.peak_bytes = counted.peak_bytes(WARM_UP, self.steps - WARM_UP)

    def median_us(self, rival: Rival) -> float:
        """Returns the median of a process's later steps."""
        return float(statistics.median(self._run(rival)["steps_us"][WARM_UP:]))

    def _run(self, rival: Rival) -> dict[str, Any]:
        done = run(Job(SCRIPT, rival.arguments).command, self.folder, **self._environment)
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    def suggest(
        self, rival: Rival, budget: int, flags: tuple[str, ...], compiled: tuple[float, ...] = ()
    ) -> tuple[str, ...]:
        """Records the plain job, searches the fastest plan that fits, and records the job under it.

        Args:
            rival: The row.
            budget: In bytes.
            flags: More options of suggest.
            compiled: The job is recorded compiled with these budgets too, as plans to choose from.

        Raises:
            RefusedError: Nothing fits.
        """
        base, head = self.folder / "rivals.memprof", self.folder / "rivals-head.memprof"
        plan = self.folder / f"rivals-{re.sub(r'[^a-z]+', '-', ' '.join(flags))}.toml"
        job = Job(SCRIPT, ("--steps", str(self.steps)))
        if not base.exists():
            run(job.recorded(base, steps=2), self.folder, **self._environment)
        runs: list[str] = []
        for share in compiled:
            path = self.folder / f"rivals-compiled-{share}.memprof"
            run(_with(job.recorded(path, steps=2), "--compile", f".@{share}"), self.folder, **self._environment)
            runs += ["--compiled", str(path)]
        asked = (
            "suggest",
            str(base),
            "--budget",
            str(budget),
            *flags,
            *runs,
            "--time-limit",
            str(self.search_s),
            "--write",
            str(plan),
            "-f",
            "--json",
        )
        try:
            told = json.loads(run([*MEMPROF, *asked], self.folder).stdout)
        except RuntimeError as error:
            raise RefusedError("nothing fits") if "ended with 4" in str(error) else error from None
        run(_with(job.recorded(head, steps=2), "--plan", str(plan)), self.folder, **self._environment)
        found = json.loads(run([*MEMPROF, "verify", str(plan), str(head), "--json"], self.folder).stdout)
        predicted, recorded = (found[key]["peak_allocated_bytes"] for key in ("predicted", "measured"))
        first = told["plans"][0]
        rival.note = f"{first['describe']}; predicted {predicted:,} bytes and time {1 + first['slowdown']:.2f}"
        rival.note += f", recorded {recorded:,} bytes"
        return ("--how", "memprof", "--plan", str(plan))

    def ask(self, rival: Rival, planner: str, budget: int) -> tuple[str, ...]:
        """Runs another planner in a process that alone can import the packages it needs.

        Raises:
            RefusedError: It is not available or finds nothing.
        """
        others, plan = self.folder / "others", self.folder / f"{planner}.json"
        if not others.exists():
            self._install(others)
        command = [sys.executable, str(PLANNERS), "--planner", planner, "--budget", str(budget), "--write", str(plan)]
        run(command, self.folder, **self._environment, PYTHONPATH=str(others))
        answer = json.loads(plan.read_text(encoding="utf-8"))
        if "refused" in answer:
            raise RefusedError(answer["refused"] + self._without)
        rival.note = answer["note"]
        return ("--how", "planned", "--plan", str(plan))

    def _install(self, others: Path) -> None:
        """Installs the rivals where nothing else looks, without what they depend on: that is here."""
        others.mkdir()
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(others)]
        for package in PACKAGES:
            try:
                run([*pip, package], self.folder)
            except RuntimeError as error:
                self._without += f" (pip: {_reason(str(error))})"


def _with(command: list[str], *options: str) -> list[str]:
    """Gives a command of memprof record more options."""
    place = command.index("record") + 1
    return [*command[:place], *options, *command[place:]]


def _row(rival: Rival, plain: Rival, static: int, budget: int) -> tuple[str, ...]:
    if not rival.peak_bytes:
        return (rival.name, "-", "-", "-", "-", "-", rival.note)
    above = rival.peak_bytes - static
    return (
        rival.name,
        format_bytes(rival.peak_bytes),
        f"{above / (plain.peak_bytes - static):.1%}",
        f"{above / (budget - static):.1%}",
        f"{rival.ratio:.2f}",
        "same" if rival.loss == plain.loss else f"{rival.loss - plain.loss:+.1e}",
        rival.note,
    )


def _bar(plain: Rival, rivals: list[Rival], budget: int) -> str:
    """Holds ours to the budget, and the fastest of ours to the fastest of the others."""
    ours = [rival for rival in rivals if rival.name.startswith(OURS)]
    fitting = [rival for rival in rivals if 0 < rival.peak_bytes <= budget]
    within = [rival for rival in ours if rival in fitting]
    best = min(within, key=lambda rival: rival.ratio, default=None)
    other = min((rival for rival in fitting if rival not in ours), key=lambda rival: rival.ratio, default=None)
    text = f"ours is never above the budget ({len(within)} of {len(ours)} within) and the fastest of all that fit"
    text += "".join(
        f"; {rival.name} {rival.ratio:.3f}{'' if rival.loss == plain.loss else ' (other numbers)'}"
        for rival in sorted(fitting, key=lambda rival: rival.ratio)
    )
    passed = ours == within and best is not None and (other is None or best.ratio <= other.ratio)
    return verdict(text, passed=passed)


def _reason(text: str) -> str:
    """Finds the line that says why a process failed: the last with an error's name, or else the last."""
    lines = text.strip().splitlines() or [""]
    named = [line for line in lines if re.match(r"(ERROR|[\w.]+(Error|Exception)):", line)]
    return (named or lines)[-1].rpartition("memprof: ")[2][:200]
