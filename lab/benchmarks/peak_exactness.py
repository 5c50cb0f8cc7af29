"""Is the replayed peak the allocator's own, to the byte, and what does a dispatch-only tracker report?"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lab.benchmarks.recording import JOBS, run, sample
from lab.benchmarks.section import Section, verdict
from memprof.replay.live import live_bytes
from memprof.trace.schema import Steps
from memprof.trace.store import Trace
from memprof.units import format_bytes
from tests import truth


def measure(folder: Path, *, quick: bool) -> Section:
    """Compares the peak of a recorded step with the allocator's log of another process, and with MemTracker."""
    rows, errors = [], []
    for name in ("gpt", "resnet", "lstm"):
        job = sample(name, "--steps", "8")
        output = folder / f"{name}.memprof"
        run(job.recorded(output), folder)
        trace = Trace.open(output)
        number = trace.steady_step().number
        ours = int(live_bytes(trace.step(number)).during.max())
        steps = trace.table(Steps)
        first = int(steps.optimizer_updates[steps.step < number].sum())
        true = truth.measure(job.script, job.arguments).peak_bytes(first, 1)
        tracked = run([sys.executable, str(JOBS / "tracked.py"), *job.command[1:]], folder)
        theirs = json.loads(tracked.stdout)["cpu"]
        errors.append(ours - true)
        rows.append(
            (
                f"{name}, step {number}",
                f"{true:,} ({format_bytes(true)})",
                f"{ours:,}",
                f"{ours - true:+,}",
                f"{theirs:,}",
                f"{theirs - true:+,} ({(theirs - true) / true:+.1%})",
            )
        )
    return Section(
        "Peak against the allocator's own count",
        "Bytes at the peak of a recorded step: the CPU allocator's own log in a separate process without a recorder "
        "(tests/truth.py), memprof's replay, and torch's MemTracker around the whole script.",
        ("sample", "allocator", "memprof", "error", "MemTracker", "error of MemTracker"),
        tuple(rows),
        verdict("0 bytes of difference", passed=not any(errors)),
    )
