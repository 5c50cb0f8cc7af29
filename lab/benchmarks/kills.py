"""What remains of a recording when the job is killed?"""

from __future__ import annotations

import random
import signal
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from lab.benchmarks.recording import environment, sample
from lab.benchmarks.section import Section, verdict
from memprof.errors import MemprofError
from memprof.trace.schema import Memory, Steps
from memprof.trace.store import Trace

#: How the job is killed: the signal, and whether the memprof process around it dies, too.
_KINDS = (
    ("SIGKILL to the job", signal.SIGKILL, False),
    ("SIGTERM to the job", signal.SIGTERM, False),
    ("SIGKILL to the job and to memprof", signal.SIGKILL, True),
)


@dataclass(frozen=True)
class Kill:
    """One killed job: whether its trace opens, what was lost before the end, and in how many steps."""

    opens: bool
    lost_s: float
    lost_steps: int


def measure(folder: Path, *, quick: bool) -> Section:
    """Kills the sample GPT at random moments while every step is recorded."""
    draw = random.Random(0)
    rows, kills = [], []
    for name, number, whole in _KINDS:
        found = [_kill(folder, number, draw.uniform(0.3, 6.0), whole=whole) for _ in range(3 if quick else 10)]
        kills += found
        lost = [kill.lost_s for kill in found if kill.opens]
        rows.append(
            (
                name,
                f"{sum(kill.opens for kill in found)} of {len(found)}",
                f"{statistics.median(lost):.2f}" if lost else "",
                f"{max(lost):.2f}" if lost else "",
                str(max(kill.lost_steps for kill in found if kill.opens)) if lost else "",
            )
        )
    passed = all(kill.opens and (kill.lost_s <= 1.0 or kill.lost_steps <= 1) for kill in kills)
    return Section(
        "Killed jobs",
        "The sample GPT, every step recorded, killed at random moments after its first step. Lost time is from the "
        "last operator in the trace to the signal; lost steps were finished (printed) but are not in the trace.",
        ("killed by", "trace opens", "median lost, s", "most lost, s", "most steps lost"),
        tuple(rows),
        verdict("always opens; loses at most one second or one step", passed=passed),
    )


def _kill(folder: Path, number: signal.Signals, delay_s: float, *, whole: bool) -> Kill:
    output = folder / f"killed-{time.monotonic_ns()}.memprof"
    command = sample("gpt", "--steps", "1000").recorded(output, skip=0, steps=1000)
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=folder, env=environment()) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        time.sleep(delay_s)
        spool = output.with_name(output.name + ".spool")
        job = psutil.Process(int(next(spool.glob("process-*")).name.partition("-")[2]))
        if whole:
            parent.send_signal(signal.SIGKILL)
        moment_us = time.time_ns() / 1e3
        job.send_signal(number)
        finished = 1 + parent.stdout.read().count(b"step ")
    try:
        trace = Trace.open(spool if whole else output)
        last_us = float(trace.table(Memory).time_us.max())
        steps = trace.table(Steps)
    except (MemprofError, ValueError):
        return Kill(opens=False, lost_s=float("nan"), lost_steps=0)
    return Kill(True, max(0.0, (moment_us - last_us) / 1e6), max(0, finished - int(steps.is_complete.sum())))
