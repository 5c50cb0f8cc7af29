"""Does a run under a plan match the prediction from the run without it?"""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from lab.gpu.reading import predicted_reserved
from lab.gpu.runs import Job, JobError, Trained, record, side_by_side
from lab.gpu.section import Found, Place
from memprof.analysis.plans.predict import forecast
from memprof.analysis.plans.verify import verify_plan
from memprof.cli.options.plan_options import chosen_plan
from memprof.errors import MemprofError
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import read_plan, write_plan
from memprof.trace.files.whole_file import whole_file
from memprof.trace.store import Trace
from tests.devices import device_peak

TITLE = "Policies: predicted against measured"
HOW = (
    "Predicted from a recording of the plain job, and written to predictions/ before the run under the plan begins. "
    "Measured by the job itself in steps that nobody records: torch's own peaks, and the median time between two "
    "moments at which it waits for the device. Reserved bytes are predicted by the model of the caching allocator, "
    "begun empty."
)
_COUNTERS = ("allocated", "reserved", "ms")
COLUMNS = ("model: plan", *(name for one in _COUNTERS for name in (f"{one}, predicted", "measured", "error")))
#: What a run came to, by counter.
Measured = dict[str, float]
LEAST = 40
MEDIAN_BAR, P95_BAR, RESERVED_BAR, TIME_BAR = 0.01, 0.03, 0.03, 0.05


@dataclass(frozen=True)
class Case:
    """One plan for one model."""

    model: str
    name: str
    flags: dict[str, tuple[str, ...]]

    @property
    def title(self) -> str:
        """What it is called in the table and in file names."""
        return f"{self.model}: {self.name}"


#: What each plan is in flags; {part} is the repeated part of a model, {loss} how its loss is cut.
PLANS = {
    "checkpoint": ("--checkpoint {part}",),
    "checkpoint, keep": ("--checkpoint {part} keep=matmul,conv,attention",),
    "checkpoint half": ("--checkpoint {half}",),
    "bf16": ("--precision bf16",),
    "fp16": ("--precision fp16",),
    "pure bf16": ("--precision pure-bf16",),
    "swap": ("--swap {part}:host",),
    "swap optimizer": ("--swap optimizer:host",),
    "swap parameters": ("--swap parameters,{part}:host",),
    "accumulate 2": ("--accumulate 2",),
    "accumulate 4": ("--accumulate 4",),
    "in backward": ("--optimizer in-backward",),
    "fused": ("--optimizer fused",),
    "loop": ("--optimizer loop",),
    "state on host": ("--optimizer host",),
    "loss in 8 chunks": ("--loss {loss}",),
    "compress": ("--compress {part}",),
    "expandable": ("--allocator expandable_segments",),
    "roundup 4": ("--allocator roundup_power2_divisions:4",),
    "zero2 over 1": ("--shard zero2:1",),
    "fsdp over 1": ("--shard fsdp:1",),
    "checkpoint + bf16": ("--checkpoint {part}", "--precision bf16"),
    "checkpoint + loss + in backward": ("--checkpoint {part}", "--loss {loss}", "--optimizer in-backward"),
    "swap + bf16": ("--swap {part}:host", "--precision bf16"),
    "accumulate 2 + checkpoint": ("--accumulate 2", "--checkpoint {part}"),
    "bf16 + expandable": ("--precision bf16", "--allocator expandable_segments"),
}
_COMMON = ("checkpoint", "bf16", "swap", "accumulate 2", "expandable", "checkpoint + bf16")
#: The models, their patterns, and their plans.
MODELS = {
    "gpt": ({"part": "layers.*", "half": "layers.[0-5]", "loss": "8,head"}, tuple(PLANS)),
    "resnet50": (
        {"part": "blocks.*", "half": "blocks.[0-7]", "loss": ""},
        (*_COMMON, "fp16", "checkpoint half", "in backward", "accumulate 2 + checkpoint", "loop"),
    ),
    "vit": ({"part": "blocks.*", "half": "blocks.[0-5]", "loss": ""}, (*_COMMON, "fp16", "fused", "accumulate 4")),
    "lstm": ({"part": "layers.*", "half": "layers.0", "loss": "8,predict"}, (*_COMMON, "loss in 8 chunks", "loop")),
    "unet": ({"part": "down.*,up.*", "half": "down.*", "loss": ""}, (*_COMMON, "compress", "checkpoint half")),
}
_TINY = {"part": "layers.*", "half": "layers.0", "loss": "8,head"}
REHEARSED = {"gpt": (_TINY, ("checkpoint", "accumulate 2", "swap"))}


def cases(place: Place) -> dict[str, list[Case]]:
    """Lists the plans of each model."""
    chosen = REHEARSED if place.is_rehearsal else MODELS
    return {
        model: [Case(model, name, _flags(PLANS[name], patterns)) for name in names]
        for model, (patterns, names) in chosen.items()
    }


def _flags(templates: tuple[str, ...], patterns: dict[str, str]) -> dict[str, tuple[str, ...]]:
    words = [template.format(**patterns).removeprefix("--").partition(" ") for template in templates]
    return {flag: (value,) for flag, _, value in words}


@dataclass(frozen=True)
class Predicted:
    """A plan, written before the run.

    Attributes:
        path: The plan's file, with its prediction.
        allocated_bytes: Of the device.
        reserved_bytes: Of the caching allocator; None where there is none.
        step_us: Duration of the step.
        parts: Rounds of the loop that make one step.
    """

    path: Path
    allocated_bytes: int
    reserved_bytes: int | None
    step_us: float
    parts: int


def measure(place: Place, found: Found) -> None:
    """Records every model, predicts all its plans, then runs it under each."""
    models = cases(place)
    bases = dict(side_by_side(place, found, [(m, m) for m in models], lambda model: _record_base(place, model)))
    for model, (base, trained) in bases.items():
        _add_base(place, found, model, base, trained)
    chosen = [case for model in bases for case in models[model]]
    # One model after the other would leave the last out where time is short.
    chosen.sort(key=lambda case: models[case.model].index(case))
    items = [(case.title, case) for case in chosen]
    refused: list[tuple[Case, str]] = []
    outcomes = []
    for case, result in side_by_side(place, found, items, lambda case: _try(place, case, bases[case.model][0])):
        if isinstance(result, str):
            refused.append((case, result))
        else:
            outcomes.append(_add(found, case, *result))
    for case, why in refused:
        found.add((case.title, "refused", *[""] * 8), model=case.model, plan=case.name, refused=why)
        found.note(f"{case.title} is refused: {why}")
    _judge(place, found, outcomes)


def _record_base(place: Place, model: str) -> tuple[Trace, Trained]:
    output = place.folder("recordings") / f"policies-{model}.memprof"
    trained = record(place, Job(model), output)
    return Trace.open(output), trained


def predict(place: Place, case: Case, base: Trace) -> Predicted:
    """Writes a plan with its prediction.

    Raises:
        MemprofError: The plan does not fit.
    """
    plan = chosen_plan(None, case.flags)
    assert plan is not None  # every case has flags
    made = forecast(base, plan)
    assert made.plan.prediction is not None  # forecast gave it one
    name = case.title.replace(": ", "-").replace(" ", "-").replace(",", "")
    path = place.folder("predictions") / f"{name}.toml"
    reserved = None if place.is_rehearsal else predicted_reserved(made.step, plan, base.manifest)
    predicted = Predicted(
        path,
        device_peak(made.step, place.device_name),
        reserved,
        made.plan.prediction.step_time_us,
        math.prod(getattr(policy, "micro_batches", 1) for policy in plan.policies),
    )
    write_plan(path, made.plan)
    with whole_file(path.with_suffix(".json")) as file:
        file.write(json.dumps({**vars(predicted), "path": path.name}).encode())
    return predicted


def _try(place: Place, case: Case, base: Trace) -> tuple[Predicted, Measured] | str:
    """Predicts a plan, writes the prediction, and runs the job under it; returns why where one of the two refuses."""
    try:
        made = predict(place, case, base)
    except MemprofError as error:
        return f"not predicted: {error}"
    output = place.folder("work") / f"{made.path.stem}.memprof"
    try:
        trained = record(place, Job(case.model), output, plan=made.path)
    except JobError as error:
        if error.returncode == 125:  # memprof's own: the plan does not fit the job, in a sentence
            return error.said
        raise
    measured: Measured = {"step_us": trained.step_us(made.parts)}
    if place.is_rehearsal:
        found = verify_plan(read_plan(made.path), Trace.open(output))
        return made, measured | {"allocated_bytes": found.measured.peak_allocated_bytes}
    output.unlink()
    return made, measured | {name: trained.peak(name, made.parts) for name in ("allocated_bytes", "reserved_bytes")}


def _add_base(place: Place, found: Found, model: str, base: Trace, trained: Trained) -> None:
    """Adds what the plain job was recorded with against what it measured itself: the noise under all else."""
    step = base.steady_step()
    reserved = None if place.is_rehearsal else predicted_reserved(step, Plan(), base.manifest)
    made = Predicted(Path(), device_peak(step, place.device_name), reserved, step.duration_us, 1)
    measured: Measured = {"step_us": trained.step_us(), "allocated_bytes": made.allocated_bytes}
    if not place.is_rehearsal:
        measured |= {name: trained.peak(name) for name in ("allocated_bytes", "reserved_bytes")}
    _add(found, Case(model, "as it is", {}), made, measured)


def _add(found: Found, case: Case, made: Predicted, measured: Measured) -> dict[str, float | None]:
    """Adds a row; returns its errors as shares of what was measured."""
    pairs = {
        "allocated_bytes": (made.allocated_bytes, measured["allocated_bytes"]),
        "reserved_bytes": (made.reserved_bytes, measured.get("reserved_bytes")),
        "step_us": (made.step_us, measured["step_us"]),
    }
    cells, errors = [], {}
    for name, (predicted, seen) in pairs.items():
        known = predicted is not None and seen is not None
        errors[name] = predicted / seen - 1 if known else None
        write = (lambda value: f"{value / 1e3:.1f}") if name == "step_us" else (lambda value: f"{int(value):,}")
        cells += [write(predicted), write(seen), f"{errors[name]:+.2%}"] if known else ["", "", ""]
    found.add(
        (case.title, *cells),
        model=case.model,
        plan=case.name,
        written_unix_s=made.path.stat().st_mtime if made.path.is_file() else None,
        ran_unix_s=time.time(),
        predicted={name: pair[0] for name, pair in pairs.items()},
        measured={name: pair[1] for name, pair in pairs.items()},
        error=errors,
    )
    return errors


def _judge(place: Place, found: Found, outcomes: list[dict[str, float | None]]) -> None:
    count = len(outcomes)
    sizes = {name: _sizes(outcomes, name) for name in ("allocated_bytes", "reserved_bytes", "step_us")}
    found.bar(f"at least {LEAST} rows measured: {count}", place.judged(count >= LEAST))
    allocated = sizes["allocated_bytes"]
    if allocated:
        middle, high = statistics.median(allocated), allocated[math.ceil(0.95 * len(allocated)) - 1]
        exact = sum(value == 0 for value in allocated)
        text = (
            f"allocated: median {middle:.2%} (bar 1 %), 95th percentile {high:.2%} (bar 3 %), exact {exact} of {count}"
        )
        found.bar(text, middle <= MEDIAN_BAR and high <= P95_BAR)
    for name, words, bar in (("reserved_bytes", "reserved", RESERVED_BAR), ("step_us", "step time", TIME_BAR)):
        if sizes[name]:
            middle = statistics.median(sizes[name])
            found.bar(f"{words}: median {middle:.2%} (bar {bar:.0%})", place.judged(middle <= bar))


def _sizes(outcomes: list[dict[str, float | None]], name: str) -> list[float]:
    """Returns the sizes of the errors that are known, rising."""
    return sorted(abs(error) for one in outcomes if (error := one[name]) is not None)
