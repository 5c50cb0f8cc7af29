"""How often is a measured peak inside the interval that was predicted for it, and how wide are the intervals?"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from lab.benchmarks.section import Bar, Section
from lab.benchmarks.unseen import ask, chosen_jobs, last_line
from lab.benchmarks.unseen_jobs import CHECKOUTS, Job, Prepared, prepare
from memprof.launch.outcome.plan_marks import REFUSED_STATUS

#: Each by itself, and those that make other operators run beside them.
POLICIES = (
    ("--precision", "bf16"),
    ("--precision", "fp16"),
    ("--precision", "pure-bf16"),
    ("--checkpoint", "*"),
    ("--swap", "*:disk"),
    ("--swap", "optimizer:disk"),
    ("--optimizer", "in-backward"),
    ("--accumulate", "2"),
    ("--precision", "bf16", "--checkpoint", "*"),
    ("--precision", "bf16", "--swap", "optimizer:disk"),
    ("--precision", "bf16", "--accumulate", "2"),
)
#: The bars: of measured peaks that many are inside, and half of the intervals are at most so wide.
COVERAGE, WIDTH = 0.95, 0.02
COLUMNS = (
    "policy",
    "predicted",
    "measured inside",
    "above",
    "below",
    "median width",
    "widest",
    "refused by the run",
    "step time, 5 % to 95 % of errors",
)


@dataclass(frozen=True)
class Pair:
    """A prediction and what was measured.

    Attributes:
        job: The job's name.
        policy: The options.
        least_bytes: Lower end of the predicted interval.
        most_bytes: Upper end.
        measured_bytes: Peak of the fullest recorded step under the policy; 0 where the run refused it.
        time_error: Predicted minus measured step time, as a share of the latter; None where not measured.
    """

    job: str
    policy: str
    least_bytes: int
    most_bytes: int
    measured_bytes: int
    time_error: float | None = None

    @property
    def width(self) -> float:
        """Width of the interval as a share of its upper end."""
        return (self.most_bytes - self.least_bytes) / self.most_bytes


def measure(folder: Path, *, quick: bool) -> Section:
    """Predicts every job under every policy that its recording allows, and runs it."""
    checkouts = Path(os.environ[CHECKOUTS]) if CHECKOUTS in os.environ else None
    ready = [job for job in chosen_jobs() if not job.lacks(checkouts)]
    chosen = ready[:2] if quick else ready
    found = [one for job in chosen for one in _try_policies(job, prepare(job, checkouts, folder), folder)]
    pairs, failed = [one for one in found if isinstance(one, Pair)], [one for one in found if isinstance(one, str)]
    return section_of(pairs, failed, len(chosen))


def section_of(pairs: list[Pair], failed: list[str], jobs: int) -> Section:
    """Returns the table by policy.

    Args:
        pairs: What was predicted and measured.
        failed: Sentences about runs that ended in an error.
        jobs: Number of jobs.
    """
    ran = [pair for pair in pairs if pair.measured_bytes]
    rows = [_row(policy, [pair for pair in pairs if pair.policy == policy]) for policy in _in_order(pairs)]
    if not ran:
        return Section("Coverage of the intervals", "Nothing was measured.", COLUMNS, ())
    inside = [pair for pair in ran if pair.least_bytes <= pair.measured_bytes <= pair.most_bytes]
    width = median(pair.width for pair in ran)
    outside = ", ".join(f"{pair.job} under {pair.policy} ({_off(pair)})" for pair in ran if pair not in inside)
    bar = f"{COVERAGE:.0%} of measured peaks inside, median width {WIDTH:.0%}"
    text = f"{len(inside)} of {len(ran)} ({len(inside) / len(ran):.1%}), {width:.1%}"
    text += f"; outside: {outside}" if outside else ""
    text += f"; failed: {'; '.join(failed)}" if failed else ""
    how = (
        f"The {jobs} unseen jobs, each recorded once and run under the policies that apply to it: the interval of "
        "`memprof predict` against the fullest recorded step. Width is a share of the interval's upper end."
    )
    passed = len(inside) >= COVERAGE * len(ran) and width <= WIDTH and not failed
    return Section("Coverage of the intervals", how, COLUMNS, tuple(rows), Bar(bar, text, passed=passed))


def _in_order(pairs: list[Pair]) -> list[str]:
    return list(dict.fromkeys(pair.policy for pair in pairs))


def _row(policy: str, pairs: list[Pair]) -> tuple[str, ...]:
    ran = [pair for pair in pairs if pair.measured_bytes]
    above = sum(pair.measured_bytes > pair.most_bytes for pair in ran)
    below = sum(pair.measured_bytes < pair.least_bytes for pair in ran)
    widths = [pair.width for pair in ran] or [0.0]
    counts = (len(pairs), len(ran) - above - below, above, below)
    refused = str(len(pairs) - len(ran))
    return (policy, *map(str, counts), f"{median(widths):.1%}", f"{max(widths):.1%}", refused, _spread(ran))


def _spread(pairs: list[Pair]) -> str:
    errors = [pair.time_error for pair in pairs if pair.time_error is not None]
    if not errors:
        return ""
    low, high = np.quantile(errors, (0.05, 0.95))
    return f"{low:+.0%} to {high:+.0%}"


def _off(pair: Pair) -> str:
    end = pair.most_bytes if pair.measured_bytes > pair.most_bytes else pair.least_bytes
    return f"{pair.measured_bytes / end - 1:+.1%}"


def _try_policies(job: Job, prepared: Prepared, folder: Path) -> Iterator[Pair | str]:
    """Yields predicted and measured peaks under each policy, or a message about a failed run."""
    base, plan, head = (folder / f"{job.name}{end}" for end in (".memprof", ".toml", "-head.memprof"))
    recorded = prepared.run("-o", str(base))
    if recorded.returncode or not base.exists():
        yield f"recording {job.name}: {last_line(recorded)}"
        return
    for options in POLICIES:
        answer, _ = ask("predict", str(base), *options, "--write", str(plan), "-f", "--json")
        if "peak_interval_bytes" not in answer:
            continue
        least, most = answer["peak_interval_bytes"]
        head.unlink(missing_ok=True)
        ran = prepared.run("-o", str(head), "--plan", str(plan))
        found, _ = ask("verify", str(plan), str(head), "--json") if head.exists() else ({}, "")
        measured = (found.get("measured") or {}).get("peak_allocated_bytes") or 0
        if not measured and ran.returncode != REFUSED_STATUS:
            yield f"{job.name} under {' '.join(options)}: {last_line(ran)}"
            continue
        error = (found.get("error") or {}).get("time_ratio")
        pair = Pair(job.name, " ".join(options), least, most, measured, error)
        print(json.dumps(asdict(pair)), file=sys.stderr, flush=True)
        yield pair
