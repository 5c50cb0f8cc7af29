"""Overhead of recording, inside and outside the window, compared with other tools."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass

from lab.gpu.runs import JOBS, MEMPROF, run, side_by_side
from lab.gpu.section import Found, Place
from memprof.cli.verbs.record import record as record_command
from memprof.trace.schema import Steps
from memprof.trace.store import Trace

TITLE = "What recording costs"
HOW = (
    "A GPT under bf16 autocast, by the job's own clock, which waits for the device at every step: median of the steps. "
    "narrow is so small that the processor is what it waits for. memprof's pauses between steps are included; "
    "torch.profiler's closing is shared out over its steps in a row of its own."
)
COLUMNS = ("model and observer", "ms a step", "ratio to plain")
_WARM_UP, _STEPS = 3, 10
_LIGHT = "--light"
#: Behind the window a step is as long as without memprof, within what two runs differ by.
_OUTSIDE_BAR = 1.03


@dataclass(frozen=True)
class Watched:
    """One model under one observer."""

    size: str
    observer: str

    @property
    def title(self) -> str:
        """What it is called."""
        return f"{self.size}: {self.observer}"


def measure(place: Place, found: Found) -> None:
    """Runs each model under each observer."""
    sizes = ("tiny",) if place.is_rehearsal else ("small", "narrow")
    # The history is that of the CUDA allocator.
    observers = ["none", "memprof", "profiler"] + ([] if place.is_rehearsal else ["history", "memtracker"])
    if any(_LIGHT in option.opts for option in record_command.params):
        observers.append("memprof --light")
    else:
        found.note("`memprof record --light` is not in this version.")
    items = [(one.title, one) for size in sizes for one in (Watched(size, name) for name in observers)]
    times: dict[str, dict[str, float]] = {size: {} for size in sizes}
    for one, result in side_by_side(place, found, items, lambda one: _times(place, one)):
        times[one.size].update(result)
    outside = []
    for size, by_observer in times.items():
        plain = by_observer.get("plain")
        for name, microseconds in by_observer.items():
            ratio = microseconds / plain if plain else None
            cells = f"{microseconds / 1e3:.2f}", f"{ratio:.2f}" if ratio else ""
            found.add((f"{size}: {name}", *cells), size=size, observer=name, step_us=microseconds, ratio=ratio)
            if name == "memprof, behind the window" and ratio:
                outside.append(ratio)
    if outside:
        text = f"behind the window at most {_OUTSIDE_BAR} times the plain step: {max(outside):.3f}"
        found.bar(text, place.judged(max(outside) <= _OUTSIDE_BAR))


def _times(place: Place, one: Watched) -> dict[str, float]:
    """Returns medians of step times in microseconds, by what they are called in the table."""
    is_light = _LIGHT in one.observer
    fixed = ["--device", place.device, "--size", one.size, "--gate", str(place.folder("work") / "gate")]
    words = [str(JOBS / "observed.py"), *fixed, "--warm-up", str(_WARM_UP), "--steps", str(_STEPS)]
    if not one.observer.startswith("memprof"):
        printed = _last_line(*run(place, [sys.executable, *words, "--observer", one.observer]))
        middle = statistics.median(step["us"] for step in printed["steps"][_WARM_UP:])
        if one.observer == "none":
            return {"plain": middle}
        if one.observer == "profiler":
            return {
                "torch.profiler (memory, shapes, stack)": middle,
                "torch.profiler, with its closing": middle + printed["closing_us"] / _STEPS,
            }
        names = {"history": "_record_memory_history (Python stacks)", "memtracker": "MemTracker"}
        return {names[one.observer]: middle}
    output = place.folder("work") / f"overhead-{one.size}{'-light' if is_light else ''}.memprof"
    window = [_LIGHT] if is_light else ["--skip", str(_WARM_UP), "--steps", "3"]
    printed = _last_line(*run(place, [*MEMPROF, "record", "-f", "-o", str(output), *window, *words]))
    if not output.is_file():
        raise RuntimeError("nothing was recorded")
    if is_light:
        return {"memprof --light, every step": statistics.median(step["us"] for step in printed["steps"][_WARM_UP:])}
    steps = Trace.open(output).table(Steps)
    printed_us = [step["us"] for step in printed["steps"]]
    seen = {
        kind: [printed_us[number] for number in steps.step[steps.kind == kind].tolist() if number < len(printed_us)]
        for kind in ("recorded", "timed")
    }
    seen["behind"] = printed_us[int(steps.step.max(initial=-1)) + 1 :]  # what the recording does not contain
    if not seen["recorded"]:
        raise RuntimeError("the recording contains no recorded step")
    names = {"recorded": "a recorded step", "timed": "the timed step", "behind": "behind the window"}
    return {f"{one.observer}, {names[kind]}": statistics.median(values) for kind, values in seen.items() if values}


def _last_line(printed: str, _: str) -> dict[str, object]:
    return json.loads(printed.splitlines()[-1])
