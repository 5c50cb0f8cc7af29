"""How long does `memprof report` take to its first output, and does it import torch?"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from lab.benchmarks.recording import environment, run, sample
from lab.benchmarks.section import Section, verdict


def measure(folder: Path, *, quick: bool) -> Section:
    """Times `memprof report` on the sample GPT's trace from start to first and last byte."""
    trace = folder / "gpt.memprof"
    if not trace.exists():
        run(sample("gpt").recorded(trace), folder)
    command = [sys.executable, "-m", "memprof.cli.main", "report", str(trace)]
    times = [_times(command, folder) for _ in range(3 if quick else 11)]
    imports = run([sys.executable, "-X", "importtime", *command[1:]], folder).stderr.decode()
    modules = {line.rpartition("|")[2].strip() for line in imports.splitlines() if line.startswith("import time:")}
    has_torch = any(module == "torch" or module.startswith("torch.") for module in modules)
    rows = (
        ("first output, s", f"{statistics.median(first for first, _ in times):.2f}"),
        ("ended, s", f"{statistics.median(last for _, last in times):.2f}"),
        ("torch imported", "yes" if has_torch else "no"),
        ("modules imported", f"{len(modules):,}"),
    )
    return Section(
        "memprof report",
        "On the trace of the sample GPT, with piped output, from the start of the process; medians.",
        ("figure", "measured"),
        rows,
        verdict("torch is not imported", passed=not has_torch),
    )


def _times(command: list[str], folder: Path) -> tuple[float, float]:
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=folder, env=environment()) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.monotonic() - start
        process.stdout.read()
    return first, time.monotonic() - start
