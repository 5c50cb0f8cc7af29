"""Overhead and savings of swapping saved tensors to disk, compared with synchronous copies."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from lab.benchmarks.recording import JOBS, ROOT, Job, run
from lab.benchmarks.section import Section, verdict
from memprof.replay.live import live_bytes
from memprof.trace.store import Trace
from memprof.units import format_bytes

_WARM_UP = 2
_NAMES = {
    "plain": "nothing swapped",
    "save_on_cpu": "torch's save_on_cpu",
    "files": "a file for each tensor, synchronously",
    "memprof": "memprof: swap to disk",
}


def measure(folder: Path, *, quick: bool) -> Section:
    """Takes the peak of a recorded run and the step time of runs without the recorder, several rounds in turn."""
    size = () if quick else ("--large",)
    steps, rounds = (5, 2) if quick else (6, 3)
    found: dict[str, list[float]] = {how: [] for how in _NAMES}
    losses, peaks = {}, {}
    for _ in range(rounds):
        for how in _NAMES:
            result = json.loads(_run(folder, Job(_SCRIPT, ("--how", how, "--steps", str(steps), *size)).command))
            found[how] += result["steps_us"][_WARM_UP:]
            losses[how] = result["loss"]
    for how in _NAMES:
        output = folder / f"{how}.memprof"
        _run(folder, Job(_SCRIPT, ("--how", how, "--steps", "6", *size)).recorded(output))
        peaks[how] = int(live_bytes(Trace.open(output).steady_step()).during.max())
    step_us = {how: statistics.median(values) for how, values in found.items()}
    rows = tuple(
        (
            name,
            format_bytes(peaks[how]),
            f"{peaks[how] / peaks['plain']:.2f}",
            f"{step_us[how] / 1e3:.1f}",
            f"{step_us[how] / step_us['plain']:.2f}",
            "yes" if losses[how] == losses["plain"] else "no",
        )
        for how, name in _NAMES.items()
    )
    is_better = peaks["memprof"] <= peaks["files"] and step_us["memprof"] < step_us["files"]
    return Section(
        "Swap to disk",
        "A GPT on one thread; saved tensors of its layers from 64 KiB on are moved. A file per tensor is the method "
        "of PyTorch's tutorial on saved tensor hooks, without parameters. save_on_cpu copies to host memory, where "
        "this job "
        "is already: it saves nothing here and shows what copying alone costs. Peaks from recorded runs, times from "
        "runs without the recorder: the median over all steps of all rounds but the first two of each. What is "
        "written passes through the page cache, which the system reclaims when memory is short.",
        ("saved tensors", "peak", "ratio", "ms per step", "ratio", "bit-identical loss"),
        rows,
        verdict("a lower or equal peak and less time than synchronous files", passed=is_better),
    )


_SCRIPT = JOBS / "swapped.py"


def _run(folder: Path, command: list[str]) -> bytes:
    return run(command, folder, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)).stdout
