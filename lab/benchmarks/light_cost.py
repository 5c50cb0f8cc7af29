"""Overhead of following a whole run with --light, compared with recording a window and torch's MemTracker."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path

from lab.benchmarks.machine import describe_load
from lab.benchmarks.recording import JOBS, Job, run, run_for_json
from lab.benchmarks.section import Section, verdict
from memprof.trace.schema import StepPeaks, Steps
from memprof.trace.store import Trace

#: Steps left out at the start: those that make the optimizer's state, and those that are always heard.
_SETTLED = 5
_STEPS = {"gpt": 20, "resnet": 20, "lstm": 20}
_ALONE = 4
#: Steps of the long runs, and of each block in which the plain and the followed process take turns.
_LONG, _BLOCKS = {"gpt": 220, "small": 8000}, {"gpt": 5, "small": 100}


def measure(folder: Path, *, quick: bool) -> Section:
    """Runs pairs of processes, one plain and one followed, in alternating order; the others once each."""
    rows, ratios = [], []
    for model, steps in _STEPS.items():
        found = defaultdict(list)
        walls, processors = [], []
        path = folder / "light.memprof"
        for pair in range(2 if quick else 5):
            job = Job(JOBS / "light.py", ("--model", model, "--steps", str(steps)))
            commands = {"plain": job.command, "light": _followed(job, path)}
            for name in ("plain", "light") if pair % 2 else ("light", "plain"):
                found[name] = _settled(run(commands[name], folder, OMP_NUM_THREADS="1").stdout)
            walls.append(found["light"][0] / found["plain"][0])
            processors.append(found["light"][1] / found["plain"][1])
        ratios.append(statistics.median(processors))
        for clock, values in (("wall clock", walls), ("processor time", processors)):
            low, middle, high = statistics.quantiles(values, n=4)
            rows.append((f"{model}: --light, {clock}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}"))
        heard = int((Trace.open(path).table(StepPeaks).how == "heard").sum())
        rows.append((f"{model}: steps heard in full of {steps}", str(heard), ""))
        plain_us = found["plain"][0]
        full = folder / "full.memprof"
        run(job.recorded(full, skip=_SETTLED, steps=3), folder, OMP_NUM_THREADS="1")
        table = Trace.open(full).table(Steps)
        recorded_us = statistics.mean(table.duration_us[table.kind == "recorded"])
        rows.append((f"{model}: a step recorded in full", f"{recorded_us / plain_us:.3f}", ""))
        tracked = Job(JOBS / "light.py", ("--model", model, "--steps", str(_ALONE), "--observer", "memtracker"))
        steps_us = json.loads(run(tracked.command, folder, OMP_NUM_THREADS="1").stdout)["steps_us"]
        rows.append((f"{model}: MemTracker", f"{statistics.median(steps_us[1:]) / plain_us:.3f}", ""))
    load = describe_load()
    late = {}
    for model, steps in _LONG.items():
        block = _BLOCKS[model]
        plain, light = _long_run(model, max(steps // 20, 4 * block) if quick else steps, block, folder)
        half = len(plain) // 2
        for which, first in (("all", 0), ("second half", half)):
            low, _, high = statistics.quantiles(
                [one / other for one, other in zip(light[first:], plain[first:], strict=True)], n=4
            )
            ratio = late[model] = sum(light[first:]) / sum(plain[first:])
            rows.append((f"{model}: --light, {steps:,} steps, {which}", f"{ratio:.4f}", f"{low:.3f} to {high:.3f}"))
        extra = [one - other for one, other in zip(light[half:], plain[half:], strict=True)]
        rows.append((f"{model}: ms of a plain step", f"{statistics.median(plain) / _BLOCKS[model] / 1e3:.2f}", ""))
        rows.append((f"{model}: additional ms a step", f"{statistics.median(extra) / _BLOCKS[model] / 1e3:.3f}", ""))
    return Section(
        "Overhead of light recordings",
        "Mean step over that of a plain run of the same length, without the first steps; pairs of processes on one "
        "thread, in alternating order, median ratio and quartiles. Processor time is that of the training thread, "
        "including reading out and writing. GPT of 4 layers of width 256, ResNet of 8 blocks on 32 images, LSTM of "
        "2 layers of 512. A step recorded in full excludes the pauses between steps. Long runs: processor time in one "
        "process, which is followed and plain in turn by blocks of "
        f"{' and '.join(f'{size} steps ({model})' for model, size in _BLOCKS.items())}; sum over sum, and quartiles of "
        f"the blocks. small: the GPT at width 64, on 8 sequences of 32. {load}",
        ("model and recorder", "ratio to plain", "quartiles"),
        tuple(rows),
        verdict(
            f"ratio of processor times at most 1.05 in short runs (worst {max(ratios):.3f}), below 1.02 in the second "
            f"half of long ones ({', '.join(f'{model} {ratio:.4f}' for model, ratio in late.items())})",
            passed=max(ratios) <= 1.05 and max(late.values()) < 1.02,
        ),
    )


def _long_run(model: str, steps: int, block: int, folder: Path) -> tuple[list[float], list[float]]:
    """Returns the processor time of each block of steps, in microseconds, without --light and with it."""
    options = ("--model", model, "--steps", str(block), "--blocks", str(steps // block))
    job = Job(JOBS / "light.py", (*options, "--output", str(folder / f"{model}-long.memprof")))
    found = run_for_json(job.command, folder, OMP_NUM_THREADS="1")
    return found["plain"], found["light"]


def _followed(job: Job, output: Path) -> list[str]:
    command = job.recorded(output)
    at = command.index("--skip")
    return [*command[:at], "--light", *command[at + 4 :]]


def _settled(stdout: bytes) -> tuple[float, float]:
    """Returns the mean step by the wall clock and in processor time, in microseconds."""
    result = json.loads(stdout)
    return statistics.mean(result["steps_us"][_SETTLED:]), statistics.mean(result["processor_us"][_SETTLED:])
