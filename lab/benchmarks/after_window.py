"""Does the job run at full speed once the window is closed?"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from lab.benchmarks.recording import JOBS, Job, run
from lab.benchmarks.section import Section, verdict

#: Steps left out at the start: skipped, recorded, timed and plain ones, and a few to settle.
_SETTLED = 15


def measure(folder: Path, *, quick: bool) -> Section:
    """Runs pairs of processes, one plain and one recorded, in alternating order."""
    rows, ratios = [], []
    for model, steps, pairs in (("tiny", 400, 20), ("gpt", 60, 10)):
        job = Job(JOBS / "observed.py", ("--model", model, "--warm-up", "0", "--steps", str(steps)))
        output = folder / "after.memprof"
        for window, command in (("--steps 3", job.recorded(output)), ("default window", job.followed(output))):
            walls, processors = [], []
            for pair in range(4 if quick else pairs):
                commands = {"plain": job.command, "recorded": command}
                order = ("plain", "recorded") if pair % 2 else ("recorded", "plain")
                found = {name: _settled(run(commands[name], folder, OMP_NUM_THREADS="1").stdout) for name in order}
                walls.append(found["recorded"][0] / found["plain"][0])
                processors.append(found["recorded"][1] / found["plain"][1])
            ratios.append(statistics.median(processors))
            for name, values in (("wall clock", walls), ("processor time", processors)):
                low, middle, high = statistics.quantiles(values, n=4)
                rows.append(
                    (f"{model}, {window}, {name}", str(len(values)), f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
                )
    return Section(
        "Overhead outside the window",
        "Median step after the window over that of a plain run of the same length; with the default window, the sizes "
        "of later inputs are read. Pairs of processes on one thread, in alternating order, median ratio and quartiles. "
        "Processor time is that of the training thread: other processes affect it less.",
        ("model and clock", "pairs", "ratio", "quartiles"),
        tuple(rows),
        verdict("ratio of processor times at most 1.01", passed=max(ratios) <= 1.01),
    )


def _settled(stdout: bytes) -> tuple[float, float]:
    """Returns the median step by the wall clock and in processor time, in microseconds."""
    result = json.loads(stdout)
    return statistics.median(result["steps_us"][_SETTLED:]), statistics.median(result["processor_us"][_SETTLED:])
