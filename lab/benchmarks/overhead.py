"""What recording costs a job, inside the window, after it and in whole runs; and what swapping to disk does."""

from __future__ import annotations

import importlib.util
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.benchmarks.recording import JOBS, ONE_THREAD, ROOT, Job, peak_bytes, run, run_for_json
from lab.benchmarks.section import Section, describe_load, middle_and_quartiles, verdict
from memprof.trace.schema import StepPeaks, Steps
from memprof.trace.store import Trace
from memprof.units import format_bytes

OBSERVED, LIGHT, SWAPPED = JOBS / "observed.py", JOBS / "light.py", JOBS / "swapped.py"
_WARM_UP = 5
_OBSERVERS = {
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
#: Steps left out at the start: those that make the optimizer's state, and those that are recorded.
_AFTER_WINDOW, _LIGHT_SETTLED = 15, 5
#: Steps of the long light runs, and of each block in which the plain and the followed process take turns.
_LONG, _BLOCKS = {"gpt": 220, "small": 8000}, {"gpt": 5, "small": 100}
_SAVED = {
    "plain": "nothing swapped",
    "save_on_cpu": "torch's save_on_cpu",
    "files": "a file for each tensor, synchronously",
    "memprof": "memprof: swap to disk",
}


def recording_cost(folder: Path, *, quick: bool) -> Section:
    """Times the steps of one process for each observer, several rounds in turn."""
    rows: list[tuple[str, ...]] = []
    ours: dict[str, float] = {}
    load = describe_load()
    for model, steps, rounds in (("tiny", 30, 7), ("gpt", 10, 5)):
        ops, step_us = _medians(folder, model, steps=steps, rounds=2 if quick else rounds)
        plain = step_us["none"]
        for key, name in _OBSERVERS.items():
            if key not in step_us:
                rows.append((f"{model}: {name}", "not installed", "", ""))
                continue
            added = (step_us[key] - plain) / ops
            if model == "tiny":
                ours[key] = added
            cells = f"{step_us[key] / 1e3:.2f}", f"{step_us[key] / plain:.2f}", "" if key == "none" else f"{added:.1f}"
            rows.append((f"{model}: {name}", *cells))
        rows.append((f"{model}: operators in a step", "", "", f"{ops:,}"))
    return Section(
        "Recording overhead",
        "One process per recorder, on one thread, in turn, several rounds; the median step of each process, then "
        "the median over rounds. tiny has 40 layers of width 8 and an optimizer that loops over its parameters, so "
        "that all its time is overhead; gpt is the sample. memprof records with Python stacks. Its pauses between "
        "steps (reading out the native events, writing) are given separately; the time torch.profiler and memray take "
        "to stop is divided over their steps. memray records every allocation of the process, with its Python stack, "
        f"not operators or tensors. {load}",
        ("model and recorder", "ms per step", "ratio to plain", "additional µs per operator"),
        rows,
        verdict(
            f"per operator of the tiny model at most 8 µs inside the step ({ours['memprof']:.1f}) and 12 with pauses "
            f"({ours['memprof with pauses']:.1f})",
            passed=ours["memprof"] <= 8 and ours["memprof with pauses"] <= 12,
        ),
    )


def _medians(folder: Path, model: str, *, steps: int, rounds: int) -> tuple[int, dict[str, float]]:
    """Returns the operators of a step and the step time in microseconds under each observer."""
    found = defaultdict(list)
    base = ("--model", model, "--warm-up", str(_WARM_UP), "--steps", str(steps))
    ops = run_for_json(Job(OBSERVED, (*base, "--count")).command, folder, **ONE_THREAD)["ops"]
    for _ in range(rounds):
        for observer in ("none", "dispatch", "memtracker", "profiler", *(("memray",) if _HAS_MEMRAY else ())):
            # MemTracker takes a hundred times as long as the plain step: a few steps must do.
            count = ("--steps", str(max(3, steps // 6))) if observer == "memtracker" else ()
            job = Job(OBSERVED, (*base, *count, "--observer", observer))
            result = run_for_json(job.command, folder, **ONE_THREAD)
            middle = statistics.median(result["steps_us"])
            found[observer].append(middle)
            if observer in ("profiler", "memray"):
                found[f"{observer} with closing"].append(middle + result["closing_us"] / steps)
        output = folder / "cost.memprof"
        result = run_for_json(Job(OBSERVED, base).recorded(output, skip=_WARM_UP, steps=steps), folder, **ONE_THREAD)
        found["memprof with pauses"].append(statistics.median(result["steps_us"]))
        table = Trace.open(output).table(Steps)
        found["memprof"].append(statistics.median(table.duration_us[table.kind == "recorded"]))
    return ops, {observer: statistics.median(values) for observer, values in found.items()}


def _pairs(
    job: Job, recorded: list[str], pairs: int, first: int, middle: Callable[[Sequence[float]], float], folder: Path
) -> tuple[list[float], list[float], float]:
    """Runs pairs of processes, one plain and one recorded, in alternating order.

    Args:
        job: The job.
        recorded: The command that records it.
        pairs: How many.
        first: The first step that counts.
        middle: What is compared of the steps that count.
        folder: Where they run.

    Returns:
        Recorded over plain of each pair, by the wall clock and in processor time, and the last plain step by the wall
        clock in microseconds.
    """
    walls, processors = [], []
    for pair in range(pairs):
        steps = {}
        for name in ("plain", "recorded") if pair % 2 else ("recorded", "plain"):
            steps[name] = run_for_json(job.command if name == "plain" else recorded, folder, **ONE_THREAD)
        for ratios, clock in ((walls, "steps_us"), (processors, "processor_us")):
            ratios.append(middle(steps["recorded"][clock][first:]) / middle(steps["plain"][clock][first:]))
    return walls, processors, middle(steps["plain"]["steps_us"][first:])


def after_window(folder: Path, *, quick: bool) -> Section:
    """Does the job run at full speed once the window is closed?"""
    rows, worst = [], 0.0
    for model, steps, pairs in (("tiny", 400, 20), ("gpt", 60, 10)):
        job = Job(OBSERVED, ("--model", model, "--warm-up", "0", "--steps", str(steps)))
        output = folder / "after.memprof"
        for window, command in (("--steps 3", job.recorded(output)), ("default window", job.followed(output))):
            count = 4 if quick else pairs
            walls, processors, _ = _pairs(job, command, count, _AFTER_WINDOW, statistics.median, folder)
            worst = max(worst, statistics.median(processors))
            for clock, values in (("wall clock", walls), ("processor time", processors)):
                rows.append((f"{model}, {window}, {clock}", str(count), *middle_and_quartiles(values)))
    return Section(
        "Overhead outside the window",
        "Median step after the window over that of a plain run of the same length; with the default window, the sizes "
        "of later inputs are read. Pairs of processes on one thread, in alternating order, median ratio and quartiles. "
        "Processor time is that of the training thread: other processes affect it less.",
        ("model and clock", "pairs", "ratio", "quartiles"),
        rows,
        verdict("ratio of processor times at most 1.01", passed=worst <= 1.01),
    )


def light_cost(folder: Path, *, quick: bool) -> Section:
    """Follows whole runs with --light, beside a recorded window and torch's MemTracker."""
    rows, worst, steps = [], 0.0, 20
    for model in ("gpt", "resnet", "lstm"):
        path, full = folder / "light.memprof", folder / "full.memprof"
        job = Job(LIGHT, ("--model", model, "--steps", str(steps)))
        followed, count = job.followed(path, "--light"), 2 if quick else 5
        walls, processors, plain_us = _pairs(job, followed, count, _LIGHT_SETTLED, statistics.mean, folder)
        worst = max(worst, statistics.median(processors))
        for clock, values in (("wall clock", walls), ("processor time", processors)):
            rows.append((f"{model}: --light, {clock}", *middle_and_quartiles(values)))
        heard = int((Trace.open(path).table(StepPeaks).how == "heard").sum())
        rows.append((f"{model}: steps heard in full of {steps}", str(heard), ""))
        run(job.recorded(full, skip=_LIGHT_SETTLED, steps=3), folder, **ONE_THREAD)
        table = Trace.open(full).table(Steps)
        recorded_us = statistics.mean(table.duration_us[table.kind == "recorded"])
        rows.append((f"{model}: a step recorded in full", f"{recorded_us / plain_us:.3f}", ""))
        tracked = Job(LIGHT, ("--model", model, "--steps", "4", "--observer", "memtracker"))
        steps_us = run_for_json(tracked.command, folder, **ONE_THREAD)["steps_us"]
        rows.append((f"{model}: MemTracker", f"{statistics.median(steps_us[1:]) / plain_us:.3f}", ""))
    load = describe_load()
    late = {}
    for model, count in _LONG.items():
        block = _BLOCKS[model]
        plain, light = _long_run(model, max(count // 20, 4 * block) if quick else count, block, folder)
        half = len(plain) // 2
        for which, first in (("all", 0), ("second half", half)):
            _, quartiles = middle_and_quartiles(
                [one / other for one, other in zip(light[first:], plain[first:], strict=True)]
            )
            ratio = late[model] = sum(light[first:]) / sum(plain[first:])
            rows.append((f"{model}: --light, {count:,} steps, {which}", f"{ratio:.4f}", quartiles))
        extra = [one - other for one, other in zip(light[half:], plain[half:], strict=True)]
        rows.append((f"{model}: ms of a plain step", f"{statistics.median(plain) / block / 1e3:.2f}", ""))
        rows.append((f"{model}: additional ms a step", f"{statistics.median(extra) / block / 1e3:.3f}", ""))
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
        rows,
        verdict(
            f"ratio of processor times at most 1.05 in short runs (worst {worst:.3f}), below 1.02 in the second "
            f"half of long ones ({', '.join(f'{model} {ratio:.4f}' for model, ratio in late.items())})",
            passed=worst <= 1.05 and max(late.values()) < 1.02,
        ),
    )


def _long_run(model: str, steps: int, block: int, folder: Path) -> tuple[list[float], list[float]]:
    """Returns the processor time of each block of steps, in microseconds, without --light and with it."""
    options = ("--model", model, "--steps", str(block), "--blocks", str(steps // block))
    job = Job(LIGHT, (*options, "--output", str(folder / f"{model}-long.memprof")))
    found = run_for_json(job.command, folder, **ONE_THREAD)
    return found["plain"], found["light"]


def swap_disk(folder: Path, *, quick: bool) -> Section:
    """Takes the peak of a recorded run and the step time of runs without the recorder, several rounds in turn."""
    size = () if quick else ("--large",)
    steps, rounds = (5, 2) if quick else (6, 3)
    found: dict[str, list[float]] = {how: [] for how in _SAVED}
    losses, peaks = {}, {}
    variables = {**ONE_THREAD, "PYTHONPATH": str(ROOT)}
    for _ in range(rounds):
        for how in _SAVED:
            job = Job(SWAPPED, ("--how", how, "--steps", str(steps), *size))
            result = run_for_json(job.command, folder, **variables)
            found[how] += result["steps_us"][2:]
            losses[how] = result["loss"]
    for how in _SAVED:
        output = folder / f"{how}.memprof"
        run(Job(SWAPPED, ("--how", how, "--steps", "6", *size)).recorded(output), folder, **variables)
        peaks[how] = peak_bytes(Trace.open(output).steady_step())
    step_us = {how: statistics.median(values) for how, values in found.items()}
    rows = []
    for how, name in _SAVED.items():
        peak = format_bytes(peaks[how]), f"{peaks[how] / peaks['plain']:.2f}"
        time = f"{step_us[how] / 1e3:.1f}", f"{step_us[how] / step_us['plain']:.2f}"
        rows.append((name, *peak, *time, "yes" if losses[how] == losses["plain"] else "no"))
    is_better = peaks["memprof"] <= peaks["files"] and step_us["memprof"] < step_us["files"]
    return Section(
        "Swap to disk",
        "A GPT on one thread; saved tensors of its layers from 64 KiB on are moved. A file per tensor is the method "
        "of PyTorch's tutorial on saved tensor hooks, without parameters. save_on_cpu copies to host memory, where "
        "this job is already: it saves nothing here and shows what copying alone costs. Peaks from recorded runs, "
        "times from runs without the recorder: the median over all steps of all rounds but the first two of each. What "
        "is written passes through the page cache, which the system reclaims when memory is short.",
        ("saved tensors", "peak", "ratio", "ms per step", "ratio", "bit-identical loss"),
        rows,
        verdict("a lower or equal peak and less time than synchronous files", passed=is_better),
    )
