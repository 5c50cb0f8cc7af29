"""How close are static plans to the lower bound, and how much does the caching allocator reserve instead?"""

from __future__ import annotations

import time
from pathlib import Path

from lab.benchmarks.section import Section, verdict
from memprof.analysis.allocator.static_report import StaticReport, build_static_report
from memprof.trace.store import Trace

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
BAR_SHARE = 0.001


def measure(folder: Path, *, quick: bool) -> Section:
    """Plans the steady step of each sample recording."""
    rows, worst = [], 0.0
    for path in sorted(SAMPLES.glob("*/run.memprof")):
        step = Trace.open(path).steady_step()
        start = time.process_time()
        report = build_static_report(step)
        seconds = time.process_time() - start
        assert report.searched is not None
        worst = max(worst, report.searched / report.bound - 1)
        rows.append(_row(path.parent.name, report, seconds))
    return Section(
        title="Static planning",
        how=(
            "The steady step of each sample recording: the memory its storages need if all lifetimes are known ahead, "
            "relative to the lower bound (most bytes needed at once), and what the caching allocator would reserve."
        ),
        columns=(
            "Step",
            "lower bound, MiB",
            "largest first",
            "best fit",
            "search",
            "given out",
            "reserved",
            "in place",
            "time",
        ),
        rows=tuple(rows),
        bar=verdict(f"search within {BAR_SHARE:.1%} of the bound", passed=worst <= BAR_SHARE),
    )


def _row(name: str, report: StaticReport, seconds: float) -> tuple[str, ...]:
    sizes = (report.greedy, report.best_fit, report.searched, report.allocated, report.reserved, report.in_place_greedy)
    above = [f"{100 * ((size or 0) / report.bound - 1):+.2f} %" for size in sizes]
    return (name, f"{report.bound / 1024**2:.2f}", *above, f"{1000 * seconds:.0f} ms")
