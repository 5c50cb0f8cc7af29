"""Does the job run at full speed once the window is closed?"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from tests.benchmarks.recording import JOBS, Job, run
from tests.benchmarks.section import Section, verdict

#: Steps left out at the start: skipped, recorded, timed and plain ones, and a few to settle.
_SETTLED = 15


def measure(folder: Path, *, quick: bool) -> Section:
    """Runs pairs of processes, one plain and one recorded, in alternating order."""
    rows, ratios = [], []
    for model, steps, pairs in (("tiny", 400, 20), ("gpt", 60, 10)):
        found = []
        for pair in range(4 if quick else pairs):
            job = Job(JOBS / "observed.py", ("--model", model, "--warm-up", "0", "--steps", str(steps)))
            commands = {"plain": job.command, "recorded": job.recorded(folder / "after.memprof")}
            order = ("plain", "recorded") if pair % 2 else ("recorded", "plain")
            medians = {name: _settled(run(commands[name], folder, OMP_NUM_THREADS="1").stdout) for name in order}
            found.append((medians["plain"], medians["recorded"]))
        ratio = sorted(recorded / plain for plain, recorded in found)
        ratios.append(statistics.median(ratio))
        rows.append(
            (
                model,
                str(len(found)),
                f"{statistics.median(plain for plain, _ in found) / 1e3:.3f}",
                f"{statistics.median(recorded for _, recorded in found) / 1e3:.3f}",
                f"{ratios[-1]:.3f}",
                f"{ratio[len(ratio) // 4]:.3f} to {ratio[-1 - len(ratio) // 4]:.3f}",
            )
        )
    return Section(
        "Outside the window",
        "Median step after the window has closed, beside that of a plain run of the same length; pairs of processes "
        "on one thread, in alternating order, median ratio and quartiles.",
        ("model", "pairs", "plain ms", "recorded ms", "ratio", "quartiles"),
        tuple(rows),
        verdict("ratio at most 1.01", passed=max(ratios) <= 1.01),
    )


def _settled(stdout: bytes) -> float:
    return statistics.median(json.loads(stdout)["steps_us"][_SETTLED:])
