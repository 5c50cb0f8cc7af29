"""How close are dry runs on a virtual GPU, and other tools' counts, to published peaks?"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.benchmarks.recording import JOBS, ONE_THREAD, Job, environment, run
from lab.benchmarks.section import Bar, Section, signed_percent
from memprof.trace.schema import DeviceMemory, Memory
from memprof.trace.store import Trace
from memprof.units import format_bytes

FOLDER = Path(__file__).parent / "published"
SCRIPT = FOLDER / "jobs" / "train.py"
#: What dry runs predicted, in bytes by id, for figures that are drawn from it.
RESULTS = FOLDER / "results.json"
#: The catalogue's name of each card. Where a source names none, its rows are of Ampere or do not say: an A100.
CARDS = {
    "NVIDIA A100": "a100-40g",
    "NVIDIA V100 32 GB": "v100-sxm2-32gb",
    "NVIDIA Tesla V100-SXM2-16GB": "v100-sxm2-16gb",
    "unknown": "a100-40g",
}
#: Bars: median of the errors' sizes, per cent, by kind of model; of allocated bytes on the evaluation set.
BARS = {"transformer": 3.0, "conv": 8.0}
COUNTERS = ("allocated", "reserved", "device")
OURS = "dry run"
#: Other counts of the same job, on fake tensors of the CPU (jobs/fake_counts.py).
PEERS = ("naive", "MemTracker")
PEER_LIMIT_S = 300


@dataclass(frozen=True)
class Peak:
    """A published peak: a row of peaks.toml, whose README says what each key means."""

    id: str
    title: str
    job: str
    source: str
    where: str
    quoted: str
    bytes: int
    rounding_bytes: int
    unit: str
    what: str
    card: str
    architecture: str
    torch: str
    set: str
    kind: str
    notes: str
    context_bytes: int = 0

    def predicted(self, told: Told) -> int:
        """Returns what a dry run says of the published counter; with the context that the source states, if any."""
        if self.what == "device" and self.context_bytes:
            return told.reserved + self.context_bytes
        return int(getattr(told, self.what))

    def error(self, size_bytes: int) -> float:
        """Returns by how many per cent a prediction is off."""
        return 100 * (size_bytes / self.bytes - 1)

    @property
    def doubt(self) -> str:
        """Says by how many per cent the source may have rounded, where that is as much as one."""
        share = 100 * self.rounding_bytes / self.bytes
        return f" (source: ±{share:.0f} %)" if share >= 1 else ""


@dataclass(frozen=True)
class Told:
    """What a dry run says of a job on a card: its highest counts, in bytes."""

    allocated: int
    reserved: int
    device: int


@dataclass(frozen=True)
class Counted:
    """A tool's result for a job: the peak in bytes, or 0 and the reason why there is none."""

    peak_bytes: int
    reason: str = ""


def measure(folder: Path, *, quick: bool) -> Section:
    """Dry-runs every published job on its card, counts it as others do, and sets the peaks side by side."""
    peaks = read_peaks()[:2] if quick else read_peaks()
    told = {job: dry_run(folder, *job) for job in dict.fromkeys((peak.job, CARDS[peak.card]) for peak in peaks)}
    counted = {(OURS, peak.id): Counted(peak.predicted(told[peak.job, CARDS[peak.card]])) for peak in peaks}
    if not quick:
        kept = {peak.id: counted[OURS, peak.id].peak_bytes for peak in peaks}
        RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    for name in PEERS:
        theirs = {job: count(name, job) for job in dict.fromkeys(peak.job for peak in peaks)}
        counted |= {(name, peak.id): theirs[peak.job] for peak in peaks}
    return compare(peaks, counted)


def read_peaks() -> list[Peak]:
    """Returns the published peaks."""
    text = (FOLDER / "peaks.toml").read_text(encoding="utf-8")
    return [Peak(**peak) for peak in tomllib.loads(text)["peak"]]


def read_results() -> dict[str, int]:
    """Returns what dry runs predicted when they were last measured, in bytes by id."""
    return dict(json.loads(RESULTS.read_text(encoding="utf-8")))


def dry_run(folder: Path, job: str, card: str) -> Told:
    """Dry-runs a published job on a card.

    Args:
        folder: Where the recording goes.
        job: Its name in ``published/jobs/train.py``.
        card: The catalogue's name.
    """
    path = folder / "run.memprof"
    run(Job(SCRIPT, (job,)).recorded(path, "--dry-run", "--device", card, skip=0), folder, **ONE_THREAD)
    trace = Trace.open(path)
    memory, device = trace.table(Memory), trace.table(DeviceMemory)
    reserved = int(memory.reserved_bytes.max())
    context = int((device.used_bytes - device.reserved_bytes).max())
    return Told(int(memory.allocated_bytes.max()), reserved, reserved + context)


def count(name: str, job: str) -> Counted:
    """Runs one of the other tools on a published job, in its own process.

    Args:
        name: One of PEERS.
        job: Its name in ``published/jobs/train.py``.
    """
    command = [sys.executable, str(JOBS / "fake_counts.py"), name, str(SCRIPT), job]
    variables = environment(**ONE_THREAD, JOB_DEVICE="cpu")
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=PEER_LIMIT_S)
    except subprocess.TimeoutExpired:
        return Counted(0, f"> {PEER_LIMIT_S} s")
    if done.returncode:
        print(f"{name} fails on {job}:", *done.stderr.splitlines()[-1:], file=sys.stderr)
        return Counted(0, "fails")
    return Counted(int(json.loads(done.stdout)["peak_bytes"]))


def compare(peaks: Sequence[Peak], counted: Mapping[tuple[str, str], Counted]) -> Section:
    """Compares published peaks with the tools' results, with medians of the absolute errors.

    Args:
        peaks: The published ones.
        counted: Results by tool and by the peak's id.
    """
    rows = []
    for peak in peaks:
        ours = counted[OURS, peak.id]
        errors = (_error(peak, counted[name, peak.id]) for name in (OURS, *PEERS))
        published = format_bytes(peak.bytes) + peak.doubt
        rows.append((peak.id, peak.set, peak.what, published, format_bytes(ours.peak_bytes), *errors))
    passed = True
    for kind, bar in BARS.items():
        judged = _judged(peaks, kind)
        rows += _medians(f"median, {kind}", "evaluation", "allocated", judged, counted)
        passed &= not judged or _median(OURS, judged, counted) <= bar
    for counter in COUNTERS:
        of_counter = [peak for peak in peaks if peak.what == counter]
        rows += _medians("median, all", "both", counter, of_counter, counted)
    return Section(
        "Published peaks",
        "Peaks on GPUs published by others (lab/benchmarks/published: sources, configurations, uncertainties), each "
        "dry-run for three steps with --device. bytes: allocated or reserved by torch, or of the whole device, to "
        "the context is added. Sources that round by one per cent or more are marked. Live storages on fake CPU "
        "tensors and torch's MemTracker cover neither reserved bytes, the context, nor autocast for CUDA, and ran for "
        f"{PEER_LIMIT_S} s at most. Medians are of the errors' sizes.",
        ("job", "set", "bytes", "published", OURS, "error", *(f"error of {name}" for name in PEERS)),
        rows,
        Bar(
            "median of allocated bytes, evaluation set: transformers <= 3 %, conv nets <= 8 %",
            ", ".join(
                f"{kind} {_median(OURS, _judged(peaks, kind), counted):.1f} %" for kind in BARS if _judged(peaks, kind)
            ),
            passed=passed,
        ),
    )


def _error(peak: Peak, counted: Counted) -> str:
    return signed_percent(peak.error(counted.peak_bytes) / 100, 1) if counted.peak_bytes else counted.reason


def _judged(peaks: Sequence[Peak], kind: str) -> list[Peak]:
    return [peak for peak in peaks if (peak.kind, peak.what, peak.set) == (kind, "allocated", "evaluation")]


def _median(name: str, peaks: Sequence[Peak], counted: Mapping[tuple[str, str], Counted]) -> float:
    """Returns the median of the sizes of one's errors, in per cent, where there are any."""
    sizes = ((peak, counted[name, peak.id].peak_bytes) for peak in peaks)
    return statistics.median(abs(peak.error(size)) for peak, size in sizes if size)


def _medians(
    title: str, of_set: str, counter: str, peaks: Sequence[Peak], counted: Mapping[tuple[str, str], Counted]
) -> list[tuple[str, ...]]:
    """Returns the row of medians of these peaks, which says of how many; none where there are no peaks."""
    if not peaks:
        return []
    cells = []
    for name in (OURS, *PEERS):
        number = sum(counted[name, peak.id].peak_bytes > 0 for peak in peaks)
        of = "" if number == len(peaks) else f" (of {number})"
        cells.append(f"{_median(name, peaks, counted):.1f} %{of}" if number else "-")
    return [(f"{title} ({len(peaks)})", of_set, counter, "", "", *cells)]
