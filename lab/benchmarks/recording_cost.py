"""Overhead of recording per operator, compared with other tools."""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections import defaultdict
from pathlib import Path

from lab.benchmarks.machine import describe_load
from lab.benchmarks.recording import JOBS, Job, run
from lab.benchmarks.section import Section, verdict
from memprof.trace.schema import Steps
from memprof.trace.store import Trace

_WARM_UP = 5
_NAMES = {
    "none": "plain",
    "dispatch": "bare dispatch mode",
    "memprof": "memprof, inside the step",
    "memprof with pauses": "memprof, with its pauses between steps",
    "memtracker": "MemTracker",
    "profiler": "torch.profiler (memory, shapes, stack)",
    "profiler with closing": "torch.profiler, including stopping",
    "memray": "memray",
    "memray with closing": "memray, including stopping",
}
#: Not a requirement of the benchmarks: measured where it is installed.
_HAS_MEMRAY = importlib.util.find_spec("memray") is not None


def measure(folder: Path, *, quick: bool) -> Section:
    """Times the steps of one process for each observer, several rounds in turn."""
    rows: list[tuple[str, ...]] = []
    ours: dict[str, float] = {}
    load = describe_load()
    for model, steps, rounds in (("tiny", 30, 7), ("gpt", 10, 5)):
        ops, step_us = _medians(folder, model, steps=steps, rounds=2 if quick else rounds)
        plain = step_us["none"]
        for key, name in _NAMES.items():
            if key not in step_us:
                rows.append((f"{model}: {name}", "not installed", "", ""))
                continue
            added = (step_us[key] - plain) / ops
            if model == "tiny":
                ours[key] = added
            rows.append(
                (
                    f"{model}: {name}",
                    f"{step_us[key] / 1e3:.2f}",
                    f"{step_us[key] / plain:.2f}",
                    "" if key == "none" else f"{added:.1f}",
                )
            )
        rows.append((f"{model}: operators in a step", "", "", f"{ops:,}"))
    return Section(
        "Recording overhead",
        "One process per recorder, on one thread, in turn, several rounds; the median step of each process, then "
        "the median over rounds. tiny has 40 layers of width 8 and an optimizer that loops over its parameters, so "
        "that all its time is overhead; gpt is the sample. memprof records with Python stacks. Its pauses between "
        "steps "
        "(reading out the native events, writing) are given separately; the time torch.profiler and memray take to "
        "stop is divided over their steps. memray records every allocation of the process, with its Python stack, not "
        f"operators or tensors. {load}",
        ("model and recorder", "ms per step", "ratio to plain", "additional µs per operator"),
        tuple(rows),
        verdict(
            f"per operator of the tiny model at most 8 µs inside the step ({ours['memprof']:.1f}) and 12 with pauses "
            f"({ours['memprof with pauses']:.1f})",
            passed=ours["memprof"] <= 8 and ours["memprof with pauses"] <= 12,
        ),
    )


def _medians(folder: Path, model: str, *, steps: int, rounds: int) -> tuple[int, dict[str, float]]:
    """Returns the operators of a step and the step time in microseconds under each observer."""
    found = defaultdict(list)
    script, base = JOBS / "observed.py", ("--model", model, "--warm-up", str(_WARM_UP), "--steps", str(steps))
    ops = json.loads(run(Job(script, (*base, "--count")).command, folder, OMP_NUM_THREADS="1").stdout)["ops"]
    for _ in range(rounds):
        for observer in ("none", "dispatch", "memtracker", "profiler", *(("memray",) if _HAS_MEMRAY else ())):
            # MemTracker takes a hundred times as long as the plain step: a few steps must do.
            count = ("--steps", str(max(3, steps // 6))) if observer == "memtracker" else ()
            job = Job(script, (*base, *count, "--observer", observer))
            result = json.loads(run(job.command, folder, OMP_NUM_THREADS="1").stdout)
            middle = statistics.median(result["steps_us"])
            found[observer].append(middle)
            if observer in ("profiler", "memray"):
                found[f"{observer} with closing"].append(middle + result["closing_us"] / steps)
        output = folder / "cost.memprof"
        result = json.loads(
            run(Job(script, base).recorded(output, skip=_WARM_UP, steps=steps), folder, OMP_NUM_THREADS="1").stdout
        )
        found["memprof with pauses"].append(statistics.median(result["steps_us"]))
        table = Trace.open(output).table(Steps)
        found["memprof"].append(statistics.median(table.duration_us[table.kind == "recorded"]))
    return ops, {observer: statistics.median(values) for observer, values in found.items()}
