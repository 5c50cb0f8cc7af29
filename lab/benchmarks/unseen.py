"""Whether suggested plans fit jobs memprof was not tuned for: third-party scripts of many kinds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lab.benchmarks.section import Bar, Section, bytes_in
from lab.benchmarks.unseen_jobs import CHECKOUTS, Job, Prepared, losses_of, prepare, read_jobs
from memprof.errors import MemprofError
from memprof.trace.schema import Memory
from memprof.trace.store import Trace

SHARES = (80, 60, 40)
SEARCH_S = 20
#: The environment variable that names some of the jobs, separated by commas, in the order in which they run.
CHOSEN = "UNSEEN_JOBS"
#: The environment variable that names the folder in which the outcomes of each finished job are kept.
RESULTS = "UNSEEN_RESULTS"
#: Steps of a dry run: those that a real run records by default.
_WINDOW = ("--skip", "2", "--steps", "3")
#: Lines that say what to type next.
_NEXT = re.compile(r"memprof: (next|then):")
COLUMNS = (
    "job",
    "kind",
    "budget",
    "plan",
    "predicted",
    "at most",
    "dry run",
    "measured",
    "of the budget",
    "within",
    "printed",
)


#: Columns of the page's table.
SHORT = (
    "budget",
    "plans found",
    "within",
    "median error of the prediction",
    "errors",
    "above the interval",
    "error of the dry run",
    "printed the same",
)


@dataclass(frozen=True)
class Outcome:
    """The result of a job at a budget; bytes are 0 where unknown.

    Attributes:
        job: Its name.
        kind: Kind of job.
        share: The budget, per cent of the recorded peak.
        plan: The plan, or why there is none.
        budget_bytes: The budget.
        predicted_bytes: The plan's predicted peak.
        most_bytes: The upper end of its interval.
        dry_bytes: The peak of a dry run under the plan.
        measured_bytes: The fullest recorded step of the run under the plan.
        printed: How its output compares with that of the plain run.
        failure: Why the run under the plan, or the recording, failed.
    """

    job: str
    kind: str
    share: int
    plan: str
    budget_bytes: int = 0
    predicted_bytes: int = 0
    most_bytes: int = 0
    dry_bytes: int = 0
    measured_bytes: int = 0
    printed: str = ""
    failure: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the run was over its budget."""
        return self.measured_bytes > self.budget_bytes > 0

    def _sizes(self) -> tuple[int, ...]:
        return self.predicted_bytes, self.most_bytes, self.dry_bytes, self.measured_bytes

    def row(self) -> tuple[str, ...]:
        """Returns the cells of COLUMNS."""
        sizes = (f"{size:,}" if size else "" for size in self._sizes())
        ran = bool(self.measured_bytes)
        of_budget = f"{self.measured_bytes / self.budget_bytes:.1%}" if ran else ""
        within = self.failure or (("no" if self.is_over else "yes") if ran else "")
        return (self.job, self.kind, f"{self.share} %", self.plan, *sizes, of_budget, within, self.printed)


def measure(folder: Path, *, quick: bool) -> Section:
    """Runs every job that can run here under a plan for each budget.

    Jobs whose outcomes the folder of results holds are not run again, so that a stopped benchmark can go on.
    """
    checkouts = Path(os.environ[CHECKOUTS]) if CHECKOUTS in os.environ else None
    jobs = chosen_jobs()
    results = Results(Path(os.environ.get(RESULTS, folder / "results")))
    ready = [job for job in jobs if not job.lacks(checkouts)]
    for job in ready[:2] if quick else ready:
        if not results.has(job):
            shares = SHARES[1:2] if quick else SHARES
            results.keep(job, list(try_job(job, prepare(job, checkouts, folder), folder, shares)))
    kept = [job for job in read_jobs() if results.has(job)]
    skipped = [(job, job.lacks(checkouts) or "not measured in this run") for job in read_jobs() if job not in kept]
    return section_of([outcome for job in kept for outcome in results.read(job)], skipped)


def chosen_jobs() -> list[Job]:
    """Returns the jobs that the environment names, in its order; all where it names none."""
    jobs = {job.name: job for job in read_jobs()}
    chosen = [name for name in os.environ.get(CHOSEN, "").split(",") if name]
    return [jobs[name] for name in chosen or jobs]


@dataclass(frozen=True)
class Results:
    """The outcomes of finished jobs, one JSON file per job; delete a file to measure its job again.

    Attributes:
        folder: Where the files are.
    """

    folder: Path

    def has(self, job: Job) -> bool:
        """Whether a job's outcomes are there."""
        return self._file(job).exists()

    def read(self, job: Job) -> list[Outcome]:
        """Returns the outcomes of a job, in the order of its budgets."""
        return [Outcome(**outcome) for outcome in json.loads(self._file(job).read_text(encoding="utf-8"))]

    def keep(self, job: Job, outcomes: list[Outcome]) -> None:
        """Writes the outcomes of a job, all or nothing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        written = self._file(job).with_suffix(".part")
        written.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1), encoding="utf-8")
        written.replace(self._file(job))

    def _file(self, job: Job) -> Path:
        return self.folder / f"{job.name}.json"


def section_of(outcomes: list[Outcome], skipped: list[tuple[Job, str]]) -> Section:
    """Returns the table of outcomes, and what was not run."""
    ran = [outcome for outcome in outcomes if outcome.measured_bytes]
    over = [f"{outcome.job} at {outcome.share} %" for outcome in ran if outcome.is_over]
    failed = [f"{outcome.job} at {outcome.share} %" for outcome in outcomes if outcome.failure]
    text = f"{len(ran) - len(over)} of {len(ran)}"
    text += f"; not {', '.join(over)}" if over else ""
    text += f"; failed: {', '.join(failed)}" if failed else ""
    how = (
        "Public training scripts, and some in their style, on random data (lab/benchmarks/unseen/jobs.toml: "
        f"commits, commands). For each budget, the fastest plan that `memprof suggest --time-limit {SEARCH_S}` finds, "
        "and a run under it."
    )
    if skipped:
        how += " Not run here: " + "; ".join(f"{job.name} ({reason})" for job, reason in skipped) + "."
    rows = tuple(outcome.row() for outcome in outcomes)
    met = Bar("measured peak within the budget", text, passed=not over and not failed)
    return Section("Unseen jobs", how, COLUMNS, rows, met, brief=brief_of(rows))


def brief_of(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns a row for each budget: plans found and kept, and how near predictions and dry runs came."""
    short = []
    for budget in dict.fromkeys(row[2] for row in rows):
        own = [row for row in rows if row[2] == budget]
        ran = [row for row in own if row[7]]
        if not ran:
            continue
        errors = [100 * (bytes_in(row[4]) / bytes_in(row[7]) - 1) for row in ran]
        above = sum(bytes_in(row[7]) > bytes_in(row[5]) for row in ran)
        dry = [abs(100 * (bytes_in(row[6]) / bytes_in(row[7]) - 1)) for row in ran if row[6]]
        equal = sum(row[10] == "equal" for row in ran)
        counts = f"{len(ran)} of {len(own)}", f"{sum(row[9] == 'yes' for row in ran)}"
        near = f"{median(map(abs, errors)):.2f} %", f"{min(errors):+.1f} to {max(errors):+.1f} %", f"{above}"
        short.append((budget, *counts, *near, f"{median(dry):.2f} %, worst {max(dry):.1f} %", f"{equal}"))
    return SHORT, short


def try_job(job: Job, prepared: Prepared, folder: Path, shares: tuple[int, ...] = SHARES) -> Iterator[Outcome]:
    """Records a job, and yields what becomes of it at each budget."""
    base = folder / f"{job.name}.memprof"
    plain = prepared.run()
    recorded = prepared.run("-o", str(base))
    if recorded.returncode or not base.exists():
        yield Outcome(job.name, job.kind, 100, "", failure=f"recording: {last_line(recorded)}")
        return
    for share in shares:
        yield _try_budget(job, prepared, base, share, plain.stdout)


def _try_budget(job: Job, prepared: Prepared, base: Path, share: int, printed: str) -> Outcome:
    plan, head, dry = (base.with_name(f"{job.name}-{share}{end}") for end in (".toml", "-head.memprof", "-dry.memprof"))
    plan.unlink(missing_ok=True)
    asked = ("suggest", str(base), "--budget", f"{share}%", "--time-limit", str(SEARCH_S), "--write", str(plan), "-f")
    answer, said = ask(*asked, "--json")
    if not plan.exists():
        return Outcome(job.name, job.kind, share, _why_not(answer, said), answer.get("budget_bytes", 0))
    best = answer["plans"][0]
    ran = prepared.run("-o", str(head), "--plan", str(plan))
    dry_run = prepared.run("--dry-run", *_WINDOW, "-o", str(dry), "--plan", str(plan))
    found, said = ask("verify", str(plan), str(head), "--json")
    measured = found.get("measured_bytes") or 0
    return Outcome(
        job.name,
        job.kind,
        share,
        best["describe"],
        answer["budget_bytes"],
        best["peak_allocated_bytes"],
        best["peak_interval_bytes"][1],
        fullest_bytes(dry) if not dry_run.returncode else 0,
        measured,
        _compare(job, printed, ran.stdout, best["numerics"]) if not ran.returncode else "",
        last_line(ran) if ran.returncode else "" if measured else f"not measured: {said}",
    )


def ask(*arguments: str) -> tuple[dict[str, Any], str]:
    """Returns what memprof prints as JSON, empty where it prints none, and its last line on stderr."""
    done = subprocess.run([sys.executable, "-P", "-m", "memprof.cli.main", *arguments], capture_output=True, text=True)
    try:
        return json.loads(done.stdout), last_line(done)
    except ValueError:
        return {}, last_line(done)


def _why_not(answer: dict[str, Any], said: str) -> str:
    least, recorded = answer.get("minimum_feasible_bytes"), (answer.get("recorded") or {}).get("peak_allocated_bytes")
    return f"nothing fits; the least is {least / recorded:.0%}" if least and recorded else said


def _compare(job: Job, before: str, after: str, numerics: str) -> str:
    if not job.seeded:
        return "not seeded"
    if losses_of(before) == losses_of(after):
        return "equal" if losses_of(before) else "nothing"
    return f"changed ({numerics})" if numerics != "none" else "CHANGED"


def fullest_bytes(path: Path) -> int:
    """Returns the highest peak of a recording's steps; 0 where it cannot be read."""
    try:
        return int(Trace.open(path).table(Memory).allocated_bytes.max())
    except (MemprofError, ValueError):
        return 0


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Returns what a run said last on stderr, next commands aside."""
    lines = [line for line in done.stderr.splitlines() if line.strip() and not _NEXT.match(line)]
    return lines[-1].removeprefix("memprof: ")[:200] if lines else f"status {done.returncode}"
