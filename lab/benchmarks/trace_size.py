"""Size of a trace, compared with torch.profiler's of the same step."""

from __future__ import annotations

import sys
from pathlib import Path

from lab.benchmarks.recording import JOBS, Job, run
from lab.benchmarks.section import Section, verdict
from memprof.trace.schema import AllocatorEvents, Ops, Steps, Uses
from memprof.trace.store import Trace
from memprof.units import format_bytes


def measure(folder: Path, *, quick: bool) -> Section:
    """Records one step of the GPT and profiles the same step with torch.profiler."""
    chrome = folder / "profiled.json.gz"
    run([sys.executable, str(JOBS / "profiled_step.py"), str(chrome)], folder)
    job = Job(JOBS / "observed.py", ("--model", "gpt", "--warm-up", "0", "--steps", "10"))
    rows = [("torch.profiler, gzipped", format_bytes(chrome.stat().st_size), "1", "", "", "1.000")]
    for steps in (1, 3):
        output = folder / f"size-{steps}.memprof"
        run(job.recorded(output, steps=steps), folder)
        trace = Trace.open(output)
        size, table = output.stat().st_size, trace.table(Steps)
        with_ops = int((table.first_op_id >= 0).sum())
        events = len(trace.table(AllocatorEvents))
        ratio = size / with_ops / chrome.stat().st_size
        rows.append(
            (
                f"memprof, window of {steps}",
                format_bytes(size),
                str(with_ops),
                f"{size / events:.1f}" if events else "",
                f"{size / (len(trace.table(Ops)) + len(trace.table(Uses))):.1f}",
                f"{ratio:.3f}",
            )
        )
    return Section(
        "Size of a trace",
        "The sample GPT: the whole .memprof file, and the gzipped Chrome trace of one step by torch.profiler with "
        "memory, shapes and stacks.",
        ("file", "size", "steps in it", "bytes per allocator event", "bytes per operator or use", "ratio for one step"),
        tuple(rows),
        verdict("with the usual window of 3, a step takes at most 1/10 of torch.profiler's", passed=ratio <= 0.1),
    )
