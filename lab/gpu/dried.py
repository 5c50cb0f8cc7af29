"""Does a dry run allocate what this device did, allocation by allocation?"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from lab.gpu.machine import ask_machine
from lab.gpu.runs import JOBS, MEMPROF, Job, run, side_by_side
from lab.gpu.section import Found, Place
from memprof.machines.catalogue import machine_of_device
from memprof.units import format_bytes

TITLE = "Dry runs against this device"
HOW = (
    "Each job runs on the device under torch's own memory history, without memprof, from its first allocation to its "
    "end; then it is dry-run on a virtual card of the same kind, and `memprof diff --allocations` compares the two. "
    "Requested bytes, rounded up to 512 on both sides; reserved as the allocator had it."
)
_ALLOCATIONS = ("allocations", "equal, in order", "more in the dry run")
COLUMNS = ("job", *_ALLOCATIONS, "peak", "error", "reserved", "error", "of the device")
PEAK_BAR, RESERVED_BAR = 0.01, 0.01
_STEPS = 3


@dataclass(frozen=True)
class Whole:
    """A job that is run whole: a script with its arguments.

    Attributes:
        name: Its name in the table.
        script: Its file in jobs.
        arguments: Of the script.
        needs: The package that it needs, "" where that is torch alone.
    """

    name: str
    script: str
    arguments: tuple[str, ...]
    needs: str = ""


#: The jobs of other sections, and the settings that they have here.
_OWN = {
    "gpt fp32": Job("gpt", ("--form", "foreach")),
    "gpt bf16": Job("gpt", ("--precision", "bf16", "--form", "fused")),
    "resnet50 fp32": Job("resnet50", ("--optimizer", "sgd")),
    "resnet50 bf16": Job("resnet50", ("--optimizer", "sgd", "--precision", "bf16")),
    "vit bf16": Job("vit", ("--precision", "bf16")),
    "lstm fp32": Job("lstm", ("--optimizer", "adam")),
    "unet fp32": Job("unet", ("--optimizer", "sgd")),
    "unet bf16": Job("unet", ("--precision", "bf16")),
}
#: The jobs of jobs/popular.py, by the package that they need, if any.
_POPULAR = {
    "transformers": ("gpt2", "bert", "t5", "qwen3", "mixture", "mamba", "whisper", "wav2vec2", "llama_checkpointed"),
    "peft": ("llama_lora",),
    "timm": ("timm_vit", "timm_resnet50", "timm_convnext", "timm_efficientnet"),
    "torchvision": ("torchvision_resnet50", "torchvision_swin", "torchvision_vgg", "deeplab", "faster_rcnn"),
    "diffusers": ("diffusion",),
    "": ("lstm", "volumes"),
    "torch_geometric": ("graph",),
}


#: The card whose dry run stands in for the device in a rehearsal.
_REHEARSED_ON = "h200"


def jobs(place: Place) -> list[Whole]:
    """Lists the jobs, those first that need nothing but torch; the first alone in a rehearsal."""
    found = []
    for name, one in _OWN.items():
        script, *arguments = one.command(place, _STEPS)
        on_device = ["cuda" if word == place.device else word for word in arguments]
        found.append(Whole(name, Path(script).name, tuple(on_device)))
    for needs, names in _POPULAR.items():
        found += [Whole(name, "popular.py", (name, "--steps", str(_STEPS)), needs) for name in names]
    return found[: 1 if place.is_rehearsal else None]


def measure(place: Place, found: Found) -> None:
    """Runs every job, and dry-runs it."""
    card = _card(place)
    chosen = [one for one in jobs(place) if not one.needs or importlib.util.find_spec(one.needs)]
    left_out = [one.name for one in jobs(place) if one not in chosen]
    if left_out:
        found.note(f"Not installed here, and left out: what {', '.join(left_out)} need.")
    items = [(one.name, one) for one in chosen]
    errors: dict[str, list[float]] = {"peak": [], "reserved": []}
    equal = 0
    ran = dict(side_by_side(place, found, items, lambda one: _run(place, card, one)))
    items = [(one.name, one) for one in ran]
    for one, compared in side_by_side(place, found, items, lambda one: _compare(place, card, one)):
        real, dry = compared["real"], compared["dry_run"]
        errors["peak"].append(abs(compared["peak_error_bytes"]) / real["peak_bytes"])
        errors["reserved"].append(abs(compared["reserved_error_bytes"]) / real["peak_reserved_bytes"])
        equal += not compared["peak_error_bytes"]
        off = compared["peak_error_bytes"]
        counts = real["allocations"], compared["equal_in_order"], dry["allocations"] - compared["equal_in_order"]
        peak = format_bytes(real["peak_bytes"]), f"{off / real['peak_bytes']:+.2%}" if off else "0 B"
        reserved = real["peak_reserved_bytes"]
        cells = format_bytes(reserved), f"{compared['reserved_error_bytes'] / reserved:+.2%}"
        process = format_bytes(ran[one]["process_bytes"]) if ran[one]["process_bytes"] else ""
        row = (one.name, *(f"{count:,}" for count in counts), *peak, *cells, process)
        found.add(row, job=one.name, ran=ran[one], compared=compared)
    if errors["peak"]:
        middle, worst = (pick(errors["peak"]) for pick in (statistics.median, max))
        text = f"peak: median {middle:.2%} (bar 1 %), worst {worst:.2%}, equal to the byte {equal} of {len(chosen)}"
        found.bar(text, middle <= PEAK_BAR)
        middle = statistics.median(errors["reserved"])
        found.bar(f"reserved: median {middle:.2%} (bar 1 %)", middle <= RESERVED_BAR)


def command_of(one: Whole, snapshot: str) -> list[str]:
    """Returns the words that run a job under torch's history, Python left out."""
    return [str(JOBS / "with_history.py"), snapshot, str(JOBS / one.script), *one.arguments]


def _card(place: Place) -> str:
    """Returns the name of the device in the catalogue."""
    if place.is_rehearsal:
        return _REHEARSED_ON
    name = str(ask_machine(place.device).get("device", ""))
    card = machine_of_device(name)
    if card is None:
        raise RuntimeError(f"{name} is not in the catalogue of devices")
    return card.name


def _snapshot(place: Place, one: Whole) -> Path:
    return place.folder("snapshots") / f"{one.name.replace(' ', '-')}.pickle"


def _run(place: Place, card: str, one: Whole) -> dict[str, int | None]:
    """Runs a job on the device and returns what it printed at its end; in a rehearsal, dry-runs it instead."""
    words = command_of(one, str(_snapshot(place, one)))
    if place.is_rehearsal:
        output = str(place.folder("work") / "rehearsed.memprof")
        run(place, [*MEMPROF, "record", "-f", "-q", "--dry-run", "--device", card, "-o", output, *words])
        return {"process_bytes": None}
    printed, _ = run(place, [sys.executable, *words])
    return json.loads(printed.splitlines()[-1])


def _compare(place: Place, card: str, one: Whole) -> dict[str, object]:
    """Dry-runs a job and returns the output of `memprof diff --allocations`."""
    snapshot = _snapshot(place, one)
    dry = [*MEMPROF, "diff", "--allocations", "--device", card, "--json", str(snapshot), "--"]
    # The exit code is 4 where the peaks differ, which the table shows.
    compared, _ = run(place, [*dry, *command_of(one, snapshot.name)], allowed=(0, 4))
    return json.loads(compared)
