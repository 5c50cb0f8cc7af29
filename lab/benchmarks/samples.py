"""Recordings of the samples: exact peaks, known categories, equal numbers, small files, and what a kill leaves."""

from __future__ import annotations

import io
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from lab.benchmarks.recording import JOBS, ONE_THREAD, Job, environment, peak_bytes, run, run_for_json, sample
from lab.benchmarks.section import Bar, Section
from lab.zoo_catalog import CASES
from lab.zoo_runs import runs_of
from memprof.errors import MemprofError
from memprof.replay.live import alive_at, live_bytes, peak_op
from memprof.trace.schema import AllocatorEvents, Memory, Ops, Steps, Uses
from memprof.trace.store import Trace
from memprof.units import format_bytes
from tests import truth

SAMPLES = ("gpt", "resnet", "lstm")
#: How the job is killed: the signal, and whether the memprof process around it dies, too.
_KINDS = (
    ("SIGKILL to the job", signal.SIGKILL, False),
    ("SIGTERM to the job", signal.SIGTERM, False),
    ("SIGKILL to the job and to memprof", signal.SIGKILL, True),
)


def peak_exactness(folder: Path, *, quick: bool) -> Section:
    """Compares the peak of a recorded step with the allocator's log of another process, and with MemTracker."""
    rows, errors = [], []
    for name in SAMPLES:
        job = sample(name, "--steps", "8")
        output = folder / f"{name}.memprof"
        run(job.recorded(output), folder)
        trace = Trace.open(output)
        number = trace.steady_step().number
        ours = peak_bytes(trace.step(number))
        steps = trace.table(Steps)
        first = int(steps.optimizer_updates[steps.step < number].sum())
        true = truth.measure(job.script, job.arguments).peak_bytes(first, 1)
        theirs = run_for_json([sys.executable, str(JOBS / "tracked.py"), *job.command[1:]], folder)["cpu"]
        errors.append(ours - true)
        allocator = f"{true:,} ({format_bytes(true)})"
        off = f"{theirs - true:+,} ({(theirs - true) / true:+.1%})"
        rows.append((f"{name}, step {number}", allocator, f"{ours:,}", f"{ours - true:+,}", f"{theirs:,}", off))
    return Section(
        "Peak against the allocator's own count",
        "Bytes at the peak of a recorded step: the CPU allocator's own log in another process without a recorder "
        "(tests/truth.py), memprof's replay, and torch's MemTracker around the script.",
        ("sample", "allocator", "memprof", "error", "MemTracker", "error of MemTracker"),
        rows,
        Bar("0 bytes of difference", f"{max(map(abs, errors)):,} bytes", passed=not any(errors)),
    )


def unknown_share(folder: Path, *, quick: bool) -> Section:
    """Records each sample and sums the storages of category unknown at the peak."""
    rows, shares = [], []
    for name in SAMPLES:
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
        rows,
        Bar("at most 1 %", f"{100 * max(shares):.2f} %", passed=max(shares) <= 0.01),
    )


def fidelity(folder: Path, *, quick: bool) -> Section:
    """Compares losses of the zoo, and losses and final parameters of the samples, bit by bit."""
    runs = [runs_of(case, folder) for case in (CASES[::6] if quick else CASES)]
    equal = [_is_equal(name, folder) for name in SAMPLES]
    counts = {
        "zoo: losses printed in full, bit-equal": [one.plain.stdout == one.recorded.stdout for one in runs],
        "zoo: stderr equal": [one.plain.stderr == one.recorded.stderr for one in runs],
        "zoo: exit status equal": [one.plain.returncode == one.recorded.returncode for one in runs],
        "samples: losses bit-equal": [losses for losses, _ in equal],
        "samples: final parameters bit-equal": [parameters for _, parameters in equal],
    }
    same, compared = (sum(count(each) for each in counts.values()) for count in (sum, len))
    return Section(
        "Fidelity",
        "Each script plain and under `memprof record`, on one thread.",
        ("compared", "equal"),
        [(name, f"{sum(are_equal)} of {len(are_equal)}") for name, are_equal in counts.items()],
        Bar("all equal", f"{same} of {compared}", passed=same == compared),
    )


def _is_equal(name: str, folder: Path) -> tuple[bool, bool]:
    """Returns whether losses and whether final parameters are equal."""
    left, right = folder / f"{name}-plain.pt", folder / f"{name}-recorded.pt"
    plain = run(sample(name, "--save-final", str(left)).command, folder, **ONE_THREAD)
    job = sample(name, "--save-final", str(right))
    recorded = run(job.recorded(folder / "fidelity.memprof"), folder, **ONE_THREAD)
    first, second = (torch.load(io.BytesIO(path.read_bytes()), weights_only=True) for path in (left, right))
    same = first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    return plain.stdout == recorded.stdout, same


def trace_size(folder: Path, *, quick: bool) -> Section:
    """Records one step of the GPT and profiles the same step with torch.profiler."""
    chrome = folder / "profiled.json.gz"
    job = Job(JOBS / "observed.py", ("--model", "gpt", "--warm-up", "0", "--steps", "10"))
    run([sys.executable, str(job.script), "--model", "gpt", "--warm-up", "3", "--export", str(chrome)], folder)
    rows = [("torch.profiler, gzipped", format_bytes(chrome.stat().st_size), "1", "", "", "1.000")]
    for steps in (1, 3):
        output = folder / f"size-{steps}.memprof"
        run(job.recorded(output, steps=steps), folder)
        trace = Trace.open(output)
        size = output.stat().st_size
        with_ops = int((trace.table(Steps).first_op_id >= 0).sum())
        events, uses = len(trace.table(AllocatorEvents)), len(trace.table(Ops)) + len(trace.table(Uses))
        ratio = size / with_ops / chrome.stat().st_size
        sizes = f"{size / events:.1f}" if events else "", f"{size / uses:.1f}"
        rows.append((f"memprof, window of {steps}", format_bytes(size), str(with_ops), *sizes, f"{ratio:.3f}"))
    return Section(
        "Size of a trace",
        "The sample GPT: the whole .memprof file, and torch.profiler's gzipped Chrome trace of one step with memory, "
        "shapes and stacks.",
        ("file", "size", "steps in it", "bytes per allocator event", "bytes per operator or use", "ratio for one step"),
        rows,
        Bar("a step of a window of 3 takes at most 0.1 of torch.profiler's", f"{ratio:.3f}", passed=ratio <= 0.1),
    )


@dataclass(frozen=True)
class Kill:
    """One killed job: whether its trace opens, what was lost before the end, and in how many steps."""

    opens: bool
    lost_s: float
    lost_steps: int


def kills(folder: Path, *, quick: bool) -> Section:
    """Kills the sample GPT at random moments while every step is recorded."""
    draw = random.Random(0)
    rows, every = [], []
    for name, number, whole in _KINDS:
        found = [_kill(folder, number, draw.uniform(0.3, 6.0), whole=whole) for _ in range(3 if quick else 10)]
        every += found
        whole_files = [kill for kill in found if kill.opens]
        lost = [kill.lost_s for kill in whole_files]
        cells = ("", "", "")
        if whole_files:
            steps = max(kill.lost_steps for kill in whole_files)
            cells = (f"{statistics.median(lost):.2f}", f"{max(lost):.2f}", str(steps))
        rows.append((name, f"{len(whole_files)} of {len(found)}", *cells))
    passed = all(kill.opens and (kill.lost_s <= 1.0 or kill.lost_steps <= 1) for kill in every)
    opened, most_s = sum(kill.opens for kill in every), max(kill.lost_s for kill in every if kill.opens)
    return Section(
        "Killed jobs",
        "The sample GPT, every step recorded, killed at random moments. Lost time: from the last recorded operator to "
        "the signal; lost steps were printed but are not in the trace.",
        ("killed by", "trace opens", "median lost, s", "most lost, s", "most steps lost"),
        rows,
        Bar(
            "always opens, loses at most one second or one step",
            f"{opened} of {len(every)} open, {most_s:.2f} s lost at most",
            passed=passed,
        ),
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
