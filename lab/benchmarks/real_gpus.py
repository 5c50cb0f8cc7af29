"""What real GPUs allocated beside dry runs of scripts that do the same; and the figures of docs/how-true.md."""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from lab.benchmarks import blind_peaks, published_peaks
from lab.benchmarks.recording import ROOT
from lab.benchmarks.section import Bar, Section, signed_percent
from memprof.analysis.compared.allocation_sequence import AllocationSequence, read_sequence
from memprof.analysis.compared.comparison import find_gaps
from memprof.cli.pages.diff.allocations_diff import (
    FAINT,
    GIB,
    INK,
    LEFT,
    RIGHT,
    WIDTH,
    draw_timelines,
    legend,
    line,
    picture,
    text_at,
)
from memprof.launch.dry.dry_outcome import collect_snapshots
from memprof.launch.parent.target import find_target
from memprof.machines.card import LT_WORKSPACE_BYTES, architecture_of
from memprof.machines.catalogue import find_machine
from memprof.trace.schema import Ints
from memprof.units import format_bytes

FOLDER, FIGURES = ROOT / "tests" / "real_gpus", ROOT / "docs" / "assets" / "how-true"
#: Steps that the GPU made before, where the script makes fewer to be quick: they leave segments behind.
WARM = {"decoder_updates": {"WARM_STEPS": "10"}}
#: Bars of reserved bytes: median of the errors' sizes and the largest, per cent.
MEDIAN, LARGEST = 0.1, 1.0
#: Runs of torch 2.9 to 2.11 that add a bias: it keeps a workspace of cuBLASLt.
_WITH_LT_WORKSPACE = ("encoder_inference", "gpt_training", "gpt_training_autocast", "vit_training_autocast")
_ALLOCATIONS = ("allocations", "equal, in order", "more in the dry run")
#: The run that is drawn.
DRAWN = "decoder_training"
#: Colours of counters, which differ for the colour-blind too.
COLORS = {"allocated": "#0b6bcb", "reserved": "#d1620a", "device": "#6b4fa0"}
BAND = "#e2f3e6"
#: Errors beyond these per cent are drawn at the edge.
EDGE = 20.0


@dataclass(frozen=True, eq=False)
class RealRun:
    """What a GPU wrote into a memory snapshot: a file of tests/real_gpus/runs.

    Attributes:
        name: Of the file, and of the script that does the same.
        card: The catalogue's name.
        torch: Version, as far as it is known.
        environment: Variables that the job had.
        sizes: Bytes of each allocation, shape ``(allocations,)``.
        live: Live bytes after each, shape ``(allocations,)``.
        peak_bytes: Peak of the live bytes.
        end_bytes: Live bytes at the end.
        peak_reserved_bytes: Peak of reserved bytes.
    """

    name: str
    card: str
    torch: str
    environment: dict[str, str]
    sizes: Ints
    live: Ints
    peak_bytes: int
    end_bytes: int
    peak_reserved_bytes: int

    @classmethod
    def read(cls, path: Path) -> RealRun:
        """Reads the file of a run."""
        run = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            name=path.stem,
            card=run["card"],
            torch=run["torch"],
            environment=run.get("environment", {}),
            sizes=np.array(run["sizes"], dtype=np.int64)[run["order"]],
            live=512 * np.array(run["live_blocks"], dtype=np.int64),
            peak_bytes=run["peak_bytes"],
            end_bytes=run["live_at_end"],
            peak_reserved_bytes=run["peak_reserved_bytes"],
        )


def version_bytes(run: RealRun) -> int:
    """Returns how much more the installed torch keeps alive than that of a run, by the rules of architectures.toml."""
    architecture = architecture_of(find_machine(run.card).capability)
    if architecture is None:
        return 0
    return {
        "decoder_forward": architecture.cublas_workspace_bytes - architecture.older_workspace_bytes,
        **dict.fromkeys(_WITH_LT_WORKSPACE, -LT_WORKSPACE_BYTES),
    }.get(run.name, 0)


def read_runs() -> list[RealRun]:
    """Returns all runs."""
    return [RealRun.read(path) for path in sorted((FOLDER / "runs").glob("*.json"))]


def dry_run(run: RealRun) -> AllocationSequence:
    """Dry-runs the script that does the same as a run."""
    here, before = Path.cwd(), dict(os.environ)
    os.chdir(FOLDER / "scripts")
    os.environ.update(run.environment)
    try:
        with tempfile.TemporaryDirectory(prefix="memprof-real-gpus-") as folder:
            target = find_target((f"{run.name}.py",), is_module=False, is_command=False)
            (taken,) = collect_snapshots(target, run.card, "gpu.pickle", Path(folder))
            return read_sequence(str(taken))
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)


def measure(folder: Path, *, quick: bool) -> Section:
    """Compares dry runs with what GPUs allocated, and draws the figures of the page."""
    del folder
    rows, exact, by_version, reserved = [], 0, 0, []
    runs = read_runs()[:1] if quick else read_runs()
    for run in runs:
        run.environment.update(WARM.get(run.name, {}))
        dry = dry_run(run)
        gaps = find_gaps(run.sizes, dry.sizes)
        missing = sum(gap.real_to - gap.real_from for gap in gaps)
        extra = sum(gap.dry_to - gap.dry_from for gap in gaps)
        exact += dry.peak_bytes == run.peak_bytes
        by_version += dry.peak_bytes != run.peak_bytes and dry.peak_bytes - run.peak_bytes == version_bytes(run)
        reserved.append(100 * abs(dry.peak_reserved_bytes / run.peak_reserved_bytes - 1))
        counts = (f"{count:,}" for count in (len(run.sizes), len(run.sizes) - missing, extra))
        sizes = ("peak_bytes", "peak_reserved_bytes")
        errors = (_error(getattr(dry, size), getattr(run, size)) for size in sizes)
        name = f"`{run.name}`", f"{run.card}, torch {run.torch}"
        rows.append((*name, *counts, format_bytes(run.peak_bytes), *errors))
        if run.name == DRAWN and not quick:
            title = f"One training step on an RTX 4090, and its dry run: {len(run.sizes):,} allocations"
            marks = [(gap.real_from, gap.real_to) for gap in gaps]
            _write("timelines", draw_timelines(title, run.live, dry.live, marks))
    if not quick:
        _write("scatter", draw_scatter(read_points()))
    return Section(
        "Allocations of real GPUs",
        "What a GPU wrote into a memory snapshot (tests/real_gpus: sources and licences), beside a dry run of a script "
        "that does the same; requested bytes, rounded up to 512 on both sides.",
        ("run", "GPU", *_ALLOCATIONS, "peak", "error of the peak", "of reserved"),
        rows,
        Bar(
            "every peak equal to the byte, but for workspaces that depend on torch's version; reserved within "
            f"{MEDIAN} % in the median and {LARGEST:g} % at worst",
            f"{exact} of {len(runs)} equal, {by_version} differ by the version alone; "
            f"{statistics.median(reserved):.2f} %, {max(reserved):.2f} %",
            passed=exact + by_version == len(runs)
            and statistics.median(reserved) <= MEDIAN
            and max(reserved) <= LARGEST,
        ),
        page="how-true.md",
    )


def read_points() -> list[Point]:
    """Returns published peaks with what dry runs predict, from the results that the benchmarks kept."""
    predictions = blind_peaks.read_predictions()
    points = [
        Point(peak.id, peak.counter.partition("_")[0], peak.bytes, predictions[peak.id].last)
        for peak in blind_peaks.read_peaks()
        if peak.id in predictions
    ]
    kept = published_peaks.read_results()
    return points + [
        Point(peak.id, peak.what, peak.bytes, kept[peak.id]) for peak in published_peaks.read_peaks() if peak.id in kept
    ]


def _error(dry_bytes: int, real_bytes: int) -> str:
    error = dry_bytes - real_bytes
    return f"{error:+,} B ({signed_percent(error / real_bytes)})" if error else "0 B"


def _write(name: str, text: str) -> None:
    FIGURES.mkdir(parents=True, exist_ok=True)
    (FIGURES / f"{name}.svg").write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Point:
    """A job whose peak is known.

    Attributes:
        name: Of the job.
        kind: Of the counter: allocated, reserved or device.
        real_bytes: Peak on the GPU.
        dry_bytes: Peak of the dry run.
    """

    name: str
    kind: str
    real_bytes: int
    dry_bytes: int

    @property
    def error(self) -> float:
        """By how many per cent the dry run is higher."""
        return 100 * (self.dry_bytes / self.real_bytes - 1)


def draw_scatter(points: Sequence[Point]) -> str:
    """Draws predicted against real peaks, and below each the error, by the size of the job.

    Args:
        points: One for each peak.

    Returns:
        The text of an SVG file.
    """
    low = 2.0 ** math.floor(math.log2(min(min(one.real_bytes, one.dry_bytes) for one in points) / GIB))
    high = 2.0 ** math.ceil(math.log2(max(max(one.real_bytes, one.dry_bytes) for one in points) / GIB))
    span = math.log2(high / low)
    inner = WIDTH - LEFT - RIGHT
    top, height, gap, strip = 56, 430, 58, 190

    def across(size: float) -> float:
        return LEFT + inner * math.log2(size / GIB / low) / span

    def up(size: float) -> float:
        return top + height - height * math.log2(size / GIB / low) / span

    def error_at(error: float) -> float:
        return top + height + gap + strip / 2 - strip / 2 * max(-EDGE, min(EDGE, error)) / EDGE

    high_y = error_at(2)
    body = [text_at(LEFT, 22, "Peak memory: dry run without a GPU, against the GPU's own counter", size=15, weight=600)]
    ticks = [low * 2**index for index in range(round(span) + 1)]
    bottom = top + height + gap + strip
    for tick in ticks:
        x, y = across(tick * GIB), up(tick * GIB)
        label = f"{tick:g}"
        body += [
            line(x, top, x, top + height, FAINT),
            line(x, top + height + gap, x, bottom, FAINT),
            line(LEFT, y, WIDTH - RIGHT, y, FAINT),
            text_at(LEFT - 8, y + 4, label, anchor="end"),
            text_at(x, bottom + 18, label, anchor="middle"),
        ]
    body += [
        line(across(low * GIB), up(low * GIB), across(high * GIB), up(high * GIB), INK, dash="4 4"),
        text_at(LEFT, top - 10, "dry run, GiB"),
        text_at(WIDTH - RIGHT, bottom + 38, "GPU, GiB", anchor="end"),
        text_at(LEFT, top + height + gap - 10, "error of the dry run, % (band: 2 %)"),
        f'<rect x="{LEFT}" y="{high_y:.1f}" width="{inner}" height="{error_at(-2) - high_y:.1f}" fill="{BAND}"/>',
    ]
    for error in (-EDGE, -10, 0, 10, EDGE):
        y = error_at(error)
        body += [
            line(LEFT, y, WIDTH - RIGHT, y, FAINT),
            text_at(LEFT - 8, y + 4, f"{error:+g}" if error else "0", anchor="end"),
        ]
    for kind, color in COLORS.items():
        chosen = [one for one in points if one.kind == kind]
        for one in chosen:
            title = f"<title>{escape(one.name)}: {one.error:+.2f} %</title>"
            x = across(one.real_bytes)
            for y in (up(one.dry_bytes), error_at(one.error)):
                body.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}" fill-opacity="0.65" stroke="#fff" '
                    f'stroke-width="0.8">{title}</circle>'
                )
    body += legend([(f"{kind} ({sum(one.kind == kind for one in points)})", color) for kind, color in COLORS.items()])
    return picture(body, bottom + 50, "Scatter of predicted against real peaks")
