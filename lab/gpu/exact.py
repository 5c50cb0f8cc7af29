"""Are the recorded peaks of a step the allocator's own, to the byte?"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from lab.gpu.reading import COUNTERS, Peaks, peaks_of
from lab.gpu.running import environment
from lab.gpu.runs import BEHIND, SKIP, WINDOW, Job, record, side_by_side
from lab.gpu.section import Found, Place
from memprof.trace.store import Trace
from tests import truth

TITLE = "Recorded peaks against torch.cuda.memory_stats()"
HOW = (
    "Each job sets the allocator's peaks back when an update has ended, and reads them when the next has; memprof "
    "records the same steps of the same process. Highest difference over the recorded steps, in bytes; the last column "
    "is memprof's replay of births and deaths against the allocator's count."
)
COLUMNS = ("configuration", "step", "allocated", "active", "reserved", "differ by", "replay differs by")
LEAST = 12

_EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True)
class Configuration:
    """One job to be recorded, and what it is called."""

    name: str
    job: Job


def _configured(model: str, precision: str, optimizer: str, form: str, *, expandable: bool = False) -> Configuration:
    arguments = ("--precision", precision, "--optimizer", optimizer, "--form", form)
    name = f"{model} {precision} {optimizer} {form}{' expandable' if expandable else ''}"
    return Configuration(name, Job(model, arguments, _EXPANDABLE if expandable else {}))


CONFIGURATIONS = (
    _configured("gpt", "fp32", "adamw", "foreach"),
    _configured("resnet50", "fp32", "sgd", "foreach"),
    _configured("gpt", "bf16", "adamw", "fused", expandable=True),
    _configured("vit", "bf16", "adamw", "foreach"),
    _configured("lstm", "fp32", "adam", "foreach"),
    _configured("unet", "fp32", "sgd", "foreach"),
    _configured("gpt-medium", "bf16", "adamw", "fused"),
    _configured("resnet50", "bf16", "adamw", "fused", expandable=True),
    _configured("vit", "fp32", "adamw", "fused"),
    _configured("lstm", "bf16", "adam", "fused", expandable=True),
    _configured("unet", "bf16", "adamw", "fused"),
    _configured("gpt", "fp32", "adamw", "fused"),
    _configured("gpt-medium", "fp32", "adamw", "foreach", expandable=True),
    _configured("gpt", "fp16", "adamw", "foreach"),
)
REHEARSED = (_configured("resnet50", "bf16", "sgd", "fused"),)


def recording_of(place: Place, configuration: Configuration) -> Path:
    """Returns where the recording of a configuration lies."""
    return place.folder("recordings") / f"{configuration.name.replace(' ', '-')}.memprof"


def configurations(place: Place) -> tuple[Configuration, ...]:
    """Returns what is recorded here."""
    return REHEARSED if place.is_rehearsal else CONFIGURATIONS


def measure(place: Place, found: Found) -> None:
    """Records every configuration and compares."""
    chosen = configurations(place)
    equal = 0
    items = [(one.name, one) for one in chosen]
    for one, (true, ours) in side_by_side(place, found, items, lambda item: _compare(place, item)):
        differences = {
            counter: max(abs((getattr(ours[step], counter) or 0) - peaks[counter]) for step, peaks in true.items())
            for counter in COUNTERS
            if counter in next(iter(true.values()))
        }
        replayed = max(abs(ours[step].replayed_bytes - peaks["allocated_bytes"]) for step, peaks in true.items())
        equal += not any(differences.values()) and not replayed
        last = max(true)
        found.add(
            (
                one.name,
                str(last),
                *(f"{true[last][counter]:,}" if counter in differences else "" for counter in COUNTERS),
                " / ".join(f"{difference:,}" for difference in differences.values()),
                f"{replayed:,}",
            ),
            configuration=one.name,
            step=last,
            torch={str(step): peaks for step, peaks in true.items()},
            memprof={str(step): vars(peaks) for step, peaks in ours.items()},
            difference_bytes=differences,
            replay_difference_bytes=replayed,
        )
    least = min(LEAST, len(chosen))
    text = f"every counter of every recorded step equal to the byte: {equal} of {len(chosen)} configurations"
    found.bar(text, equal == len(chosen) >= least)


def _compare(place: Place, one: Configuration) -> tuple[dict[int, dict[str, int]], dict[int, Peaks]]:
    """Returns the allocator's and the recorded peaks of each recorded step."""
    output = recording_of(place, one)
    trained = record(place, one.job, output)
    trace = Trace.open(output)
    numbers = trace.recorded_steps
    if not numbers or min(numbers) < SKIP:
        raise RuntimeError(f"no step of the window was recorded: {trace.manifest.capture.reason or 'no reason given'}")
    ours = {number: peaks_of(trace.step(number), place.device_name) for number in numbers}
    if place.is_rehearsal:
        true = _logged(place, one.job, numbers)
    else:
        true = {number: {name: int(trained.steps[number][name]) for name in COUNTERS} for number in numbers}
    return true, ours


def _logged(place: Place, job: Job, numbers: tuple[int, ...]) -> dict[int, dict[str, int]]:
    """Asks the processor's allocator, whose log of a run of its own is the truth there."""
    script, *arguments = job.command(place, SKIP + WINDOW + BEHIND)
    true = truth.measure(script, arguments, environment(OMP_NUM_THREADS="1"))
    if true.returncode:
        raise RuntimeError(f"{script} ended with {true.returncode} under {sys.executable}")
    return {number: {"allocated_bytes": true.peak_bytes(number, 1)} for number in numbers}
