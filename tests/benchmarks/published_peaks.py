"""How near do dry runs on a virtual GPU come to peaks that others have published?"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memprof.trace.schema import DeviceMemory, Memory
from memprof.trace.store import Trace
from memprof.units import format_bytes
from tests.benchmarks.section import Section, verdict

_FOLDER = Path(__file__).parent / "published"
#: The catalogue's name of each card; where none is named, one of the architecture most of the others ran on.
_CARDS = {
    "NVIDIA A100": "a100-40g",
    "NVIDIA V100 32 GB": "v100-sxm2-32gb",
    "NVIDIA Tesla V100-SXM2-16GB": "v100-sxm2-16gb",
    "unknown": "a100-40g",
}
#: Bars: median of the errors' sizes, per cent, by kind of model; of allocated bytes on the evaluation set.
_BARS = {"transformer": 3.0, "conv": 8.0}


@dataclass(frozen=True)
class Told:
    """What a dry run says of a job on a card: its highest counts, in bytes."""

    allocated: int
    reserved: int
    device: int


def measure(folder: Path, *, quick: bool) -> Section:
    """Dry-runs every published job on its card, and sets the peaks side by side."""
    peaks = read_peaks()[:2] if quick else read_peaks()
    told = {
        name: dry_run(folder, *name) for name in dict.fromkeys((peak["job"], _CARDS[peak["card"]]) for peak in peaks)
    }
    rows = []
    errors: dict[tuple[str, str], list[float]] = {}
    for peak in peaks:
        predicted = getattr(told[peak["job"], _CARDS[peak["card"]]], peak["what"])
        error = 100 * (predicted / peak["bytes"] - 1)
        errors.setdefault((peak["kind"], peak["set"]), []).append(abs(error))
        published = format_bytes(peak["bytes"])
        rows.append((peak["title"], peak["set"], peak["what"], published, format_bytes(predicted), f"{error:+.1f} %"))
    medians = {key: statistics.median(found) for key, found in errors.items()}
    rows += [
        (f"median of {kind}, {of}", of, "", "", "", f"{median:.1f} %") for (kind, of), median in sorted(medians.items())
    ]
    passed = all(medians.get((kind, "evaluation"), 0.0) <= bar for kind, bar in _BARS.items())
    return Section(
        "Published peaks",
        "Jobs whose peak on a GPU others have published (tests/benchmarks/published: sources, configurations, what is "
        "uncertain), each dry-run for three steps on its card with --device. Which counter was published is in the "
        "third column: bytes allocated or reserved by torch, or of the whole device, where a rule for the context is "
        "added. Rows for calibration may shape the estimates of libraries' workspaces; rows for evaluation may not.",
        ("job", "set", "bytes", "published", "dry run", "error"),
        tuple(rows),
        verdict("median on the evaluation set, transformers <= 3 %, conv nets <= 8 %", passed=passed),
    )


def read_peaks() -> list[dict[str, Any]]:
    """Returns the published peaks."""
    peaks: list[dict[str, Any]] = tomllib.loads((_FOLDER / "peaks.toml").read_text(encoding="utf-8"))["peak"]
    return peaks


def dry_run(folder: Path, job: str, card: str) -> Told:
    """Dry-runs a published job on a card."""
    path = folder / "run.memprof"
    script = str(_FOLDER / "jobs" / f"{job}.py")
    words = (
        "record",
        "-f",
        "-q",
        "--dry-run",
        "--device",
        card,
        "--skip",
        "0",
        "--steps",
        "3",
        "-o",
        str(path),
        script,
    )
    subprocess.run(
        [sys.executable, "-P", "-m", "memprof.cli.main", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    trace = Trace.open(path)
    memory, device = trace.table(Memory), trace.table(DeviceMemory)
    context = int((device.used_bytes - device.reserved_bytes).max())
    reserved = int(memory.reserved_bytes.max())
    return Told(int(memory.allocated_bytes.max()), reserved, reserved + context)


def main() -> None:
    """Prints what dry runs say of chosen jobs, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("jobs", nargs="*")
    arguments = parser.parse_args()
    for peak in read_peaks():
        if arguments.jobs and peak["job"] not in arguments.jobs:
            continue
        told = dry_run(arguments.folder, peak["job"], _CARDS[peak["card"]])
        error = 100 * (getattr(told, peak["what"]) / peak["bytes"] - 1)
        print(
            json.dumps(
                {"id": peak["id"], "set": peak["set"], "what": peak["what"], "published": peak["bytes"]}
                | vars(told)
                | {"error": round(error, 2)}
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
