"""Time to print each command's help, compared with Python itself and with click."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from lab.benchmarks.recording import environment
from lab.benchmarks.section import Section, verdict
from memprof.cli.main import VERBS

#: What may not be imported for a help: each of them takes longer than the rest together.
_SLOW = ("torch", "pandas", "numpy", "scipy", "pyarrow", "dash", "plotly", "rich", "psutil")
#: What starting a verb may take beside importing click alone.
_MOST = 2.5


def measure(folder: Path, *, quick: bool) -> Section:
    """Times `memprof VERB --help`, in turns with `python -c pass` and `python -c 'import click'`."""
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "python -c 'import click'": [sys.executable, "-c", "import click"],
        "memprof --help": _memprof("--help"),
        **{f"memprof {verb} --help": _memprof(verb, "--help") for verb in VERBS},
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(3 if quick else 15):  # in turns, so that a busy moment of the machine meets all of them
        for name, command in commands.items():
            times[name].append(_seconds(command, folder))
    least = {name: statistics.median(taken) for name, taken in times.items()}
    bare, click = least["python -c pass"], least["python -c 'import click'"]
    slow = {name: _slow_modules(command, folder) for name, command in commands.items()}
    rows = tuple(
        (name, f"{1000 * taken:.0f}", f"{taken / bare:.2f}", f"{taken / click:.2f}", ", ".join(slow[name]) or "none")
        for name, taken in least.items()
    )
    worst = max(taken / click for taken in least.values())
    passed = worst <= _MOST and not any(slow.values())
    return Section(
        "Startup time of each verb",
        "From the start of the process to its end, medians of interleaved runs; the last column names the slow "
        "libraries "
        f"that are imported, of {', '.join(_SLOW)}.",
        ("command", "ms", "times python -c pass", "times import click", "slow imports"),
        rows,
        verdict(f"at most {_MOST} times import click (the most: {worst:.2f}), and no slow library", passed=passed),
    )


def _memprof(*words: str) -> list[str]:
    return [sys.executable, "-m", "memprof", *words]


def _seconds(command: list[str], folder: Path) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder, env=environment())
    return time.perf_counter() - start


def _slow_modules(command: list[str], folder: Path) -> list[str]:
    timed = [command[0], "-X", "importtime", *command[1:]]
    said = subprocess.run(timed, check=True, capture_output=True, text=True, cwd=folder, env=environment()).stderr
    imported = {line.rpartition("|")[2].strip() for line in said.splitlines() if line.startswith("import time:")}
    return [name for name in _SLOW if name in imported]
