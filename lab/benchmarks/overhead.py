"""What recording costs a job, inside the window, after it and in whole runs; and what swapping to disk does."""

from __future__ import annotations

import importlib.util
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.benchmarks.recording import JOBS, ONE_THREAD, ROOT, Job, peak_bytes, run, run_for_json
from lab.benchmarks.section import Bar, Section, describe_load, middle_and_quartiles
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
#: Ends of the names of rows that the page leaves to the file.
_IN_FILE_ALONE = (", wall clock", ", all", "in full", "MemTracker")
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
        "Median step of a process per recorder, one thread, in turn over rounds. tiny: 40 layers of width 8, all "
        "overhead; gpt: the sample; µs are added per operator. memprof's pauses (reading out, writing) and the "
        f"stopping of torch.profiler and memray, divided over the steps, have rows of their own. {load}",
        ("recorder", *(f"{model}: {figure}" for model in ("tiny", "gpt") for figure in ("ms", "ratio", "µs"))),
        side_by_side(rows),
        Bar(
            "per operator of the tiny model at most 8 µs inside the step, 12 with pauses",
            f"{ours['memprof']:.1f} and {ours['memprof with pauses']:.1f} µs",
            passed=ours["memprof"] <= 8 and ours["memprof with pauses"] <= 12,
        ),
    )


def side_by_side(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Returns rows of two models, each named ``model: row``, with both models' cells in one row."""
    joined: dict[str, list[str]] = {}
    for name, *cells in rows:
        joined.setdefault(name.partition(": ")[2], []).extend(cells)
    return [(name, *cells) for name, cells in joined.items()]


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
        "Median step after the window over a plain run's; pairs of processes on one thread, in alternating order. "
        "Processor time is the training thread's. With the default window, sizes of later inputs are read.",
        ("model and clock", "pairs", "ratio", "quartiles"),
        rows,
        Bar("ratio of processor times at most 1.01", f"{worst:.3f}", passed=worst <= 1.01),
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
        "Processor time of the training thread, reading out and writing included, over a plain run's; median ratio of "
        "pairs of processes, and quartiles. GPT of width 256, ResNet of 8 blocks, LSTM of 2 layers of 512; small: the "
        "GPT at width 64. Long runs: one process, followed and plain in turn by blocks of "
        f"{' and '.join(f'{size} steps ({model})' for model, size in _BLOCKS.items())}. {load}",
        ("model and recorder", "ratio to plain", "quartiles"),
        rows,
        Bar(
            "ratio of processor times at most 1.05 in short runs, below 1.02 in the second half of long ones",
            f"{worst:.3f}; {', '.join(f'{model} {ratio:.4f}' for model, ratio in late.items())}",
            passed=worst <= 1.05 and max(late.values()) < 1.02,
        ),
        brief=(
            ("model and recorder", "ratio to plain", "quartiles"),
            [row for row in rows if not row[0].endswith((*_IN_FILE_ALONE, f"of {steps}"))],
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
        "A GPT on one thread; saved tensors of its layers from 64 KiB on are moved. A file for each tensor is the "
        "method of PyTorch's tutorial on saved tensor hooks; save_on_cpu copies to host memory, where this job is "
        "already, and shows what copying costs. Times are medians of runs without the recorder.",
        ("saved tensors", "peak", "ratio", "ms per step", "ratio", "bit-identical loss"),
        rows,
        Bar(
            "a lower or equal peak and less time than synchronous files",
            f"peak {peaks['memprof'] / peaks['files']:.2f}, time {step_us['memprof'] / step_us['files']:.2f} of theirs",
            passed=is_better,
        ),
    )
