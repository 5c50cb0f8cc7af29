"""How long does a search take, and how does that grow with the operators?"""

from __future__ import annotations

import time
from pathlib import Path

from lab.benchmarks.recording import run, sample
from lab.benchmarks.section import Section, verdict
from memprof.planners.find import find_plan
from memprof.planners.search.explore import explore
from memprof.planners.search.request import SearchRequest
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.planners.graphs import residual

#: Highest time of a search for a 24-layer GPT, in seconds.
BAR_S = 10.0


def measure(folder: Path, *, quick: bool) -> Section:
    """Searches at half of the peak: GPTs of more and more layers, and convolutional graphs built from arrays."""
    rows, of_24 = [], 0.0
    for layers in (4, 24) if quick else (4, 24, 48, 440):
        path = folder / f"gpt{layers}.memprof"
        arguments = ("--layers", str(layers), "--batch-size", "8", "--length", "64", "--width", "32", "--steps", "8")
        run(sample("gpt", *arguments).recorded(path, steps=1), folder, OMP_NUM_THREADS="1")
        step = Trace.open(path).steady_step()
        budget = _halfway(step)
        started = time.monotonic()
        answer = explore(step, SearchRequest(budget, time_limit_s=600.0))
        took = time.monotonic() - started
        of_24 = took if layers == 24 else of_24
        best = answer.best
        rows.append(
            (
                f"suggest, GPT of {layers} layers",
                f"{len(step.ops):,}",
                f"{answer.tried}",
                f"{took:.1f}",
                "" if best is None else f"{100 * (best.step_time_us / step.duration_us - 1):+.1f} %",
            )
        )
    for blocks in (28, 70) if quick else (28, 70, 700, 7000):
        step = residual(blocks)
        started = time.monotonic()
        found = find_plan(step, _halfway(step), time_limit_s=60.0)
        took = time.monotonic() - started
        overhead = 100 * (found.schedule_time_us / step.duration_us - 1) if found.runs is not None else float("nan")
        rows.append((f"auto, {blocks} residual blocks", f"{len(step.ops):,}", "", f"{took:.1f}", f"{overhead:+.1f} %"))
    return Section(
        "Search time",
        "A budget halfway between what the step begins with and its peak. `suggest` replays whole plans; `auto` plans "
        "single operators, for 60 s at most.",
        ("search", "operators", "plans replayed", "seconds", "overhead over the step time"),
        tuple(rows),
        verdict(f"24-layer GPT within {BAR_S:.0f} s: {of_24:.1f} s", passed=of_24 <= BAR_S),
    )


def _halfway(step: Step) -> int:
    """Returns a budget that leaves half of what the step needs beyond what it begins with."""
    during = live_bytes(step).during
    return int(during[0] + during.max()) // 2
