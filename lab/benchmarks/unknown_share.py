"""How much of the memory at the peak has no known category?"""

from __future__ import annotations

from pathlib import Path

from lab.benchmarks.recording import run, sample
from lab.benchmarks.section import Section, verdict
from memprof.replay.live import alive_at, live_bytes, peak_op
from memprof.trace.store import Trace
from memprof.units import format_bytes


def measure(folder: Path, *, quick: bool) -> Section:
    """Records each sample and sums the storages of category unknown at the peak."""
    rows, shares = [], []
    for name in ("gpt", "resnet", "lstm"):
        output = folder / f"{name}.memprof"
        if not output.exists():
            run(sample(name).recorded(output), folder)
        step = Trace.open(output).steady_step()
        peak = peak_op(step)
        total = int(live_bytes(step).during[peak])
        rows_unknown = alive_at(step, peak) & (step.storages.category == "unknown")
        unknown = int(step.storages.allocated_bytes[rows_unknown].sum())
        shares.append(unknown / total)
        rows.append((name, format_bytes(total), f"{unknown:,}", f"{unknown / total:.2%}"))
    return Section(
        "Bytes of unknown category at the peak",
        "Steady step of each sample.",
        ("sample", "peak", "unknown bytes", "share"),
        tuple(rows),
        verdict("at most 1 %", passed=max(shares) <= 0.01),
    )
