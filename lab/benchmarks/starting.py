"""How long commands of memprof take until they start and to their end, and what they import."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from lab.benchmarks.recording import MEMPROF, SAMPLES, environment, imports_of, run, sample
from lab.benchmarks.section import Bar, Section, least_middle_most
from memprof.cli.main import VERBS
from tests.synthetic import write_synthetic

#: What may not be imported for a help: each of them takes longer than the rest together.
_SLOW = ("torch", "pandas", "numpy", "scipy", "pyarrow", "dash", "plotly", "rich", "psutil")
#: What starting a verb may take beside importing click alone.
_MOST = 2.5
#: Most seconds for two recordings of 100,000 operators, from the start of the process to its end, and for imports.
_DIFF_S, _IMPORT_S = 2.0, 0.5
_EVENTS = 200_000  # a birth and a death an operator
#: Runs memprof in this process and tells what that imported.
_RUN = """
import json, sys
from memprof.cli.main import main
status = main(sys.argv[1:])
json.dump({"status": status, "has_torch": "torch" in sys.modules}, sys.stderr)
"""


def report_start(folder: Path, *, quick: bool) -> Section:
    """Times `memprof report` on the sample GPT's trace from start to first and last byte."""
    trace = folder / "gpt.memprof"
    if not trace.exists():
        run(sample("gpt").recorded(trace), folder)
    command = [*MEMPROF, "report", str(trace)]
    times = [_first_and_last_s(command, folder) for _ in range(3 if quick else 11)]
    modules = imports_of(command, folder)
    has_torch = any(module == "torch" or module.startswith("torch.") for module in modules)
    return Section(
        "memprof report",
        "On the recording of the sample GPT, from the start of the process; medians.",
        ("figure", "measured"),
        [
            ("first output, s", f"{statistics.median(first for first, _ in times):.2f}"),
            ("ended, s", f"{statistics.median(last for _, last in times):.2f}"),
            ("torch imported", "yes" if has_torch else "no"),
            ("modules imported", f"{len(modules):,}"),
        ],
        Bar("torch is not imported", "imported" if has_torch else "not imported", passed=not has_torch),
    )


def _first_and_last_s(command: list[str], folder: Path) -> tuple[float, float]:
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=folder, env=environment()) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.monotonic() - start
        process.stdout.read()
    return first, time.monotonic() - start


def verb_start(folder: Path, *, quick: bool) -> Section:
    """Times `memprof VERB --help`, in turns with `python -c pass` and `python -c 'import click'`."""
    words = {"memprof --help": ["--help"], **{f"memprof {verb} --help": [verb, "--help"] for verb in VERBS}}
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "python -c 'import click'": [sys.executable, "-c", "import click"],
        **{name: [sys.executable, "-m", "memprof", *more] for name, more in words.items()},
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(3 if quick else 15):  # in turns, so that a busy moment of the machine meets all of them
        for name, command in commands.items():
            start = time.perf_counter()
            run(command, folder)
            times[name].append(time.perf_counter() - start)
    least = {name: statistics.median(taken) for name, taken in times.items()}
    bare, click = least["python -c pass"], least["python -c 'import click'"]
    imported = {name: imports_of(command, folder) for name, command in commands.items()}
    slow = {name: [one for one in _SLOW if one in modules] for name, modules in imported.items()}
    worst = max(taken / click for taken in least.values())
    columns = ("command", "ms", "times python -c pass", "times import click", "slow imports")
    rows = [
        (name, f"{1000 * s:.0f}", f"{s / bare:.2f}", f"{s / click:.2f}", ", ".join(slow[name]) or "none")
        for name, s in least.items()
    ]
    return Section(
        "Startup time of each verb",
        "From start to end of the process, medians of interleaved runs: Python, click, and the fastest, the median and "
        f"the slowest of the verbs. Slow libraries are {', '.join(_SLOW)}.",
        columns,
        rows,
        Bar(
            f"at most {_MOST} times import click, no slow library",
            f"{worst:.2f}, {'some' if any(slow.values()) else 'none'}",
            passed=worst <= _MOST and not any(slow.values()),
        ),
        brief=(columns, [*rows[:2], *least_middle_most(rows[2:], 1)]),
    )


def diff_speed(folder: Path, *, quick: bool) -> Section:
    """Times `memprof diff` on two recordings of 100,000 operators, and what it imports."""
    times = 2 if quick else 7
    rows, longest = [], 0.0
    for what, layers in (("in a hundred steps", 32), ("in one step", 3300)):
        sides = [folder / f"speed-{layers}-{seed}.memprof" for seed in range(2)]
        for seed, side in enumerate(sides):
            write_synthetic(side, _EVENTS, layers=layers, seed=seed)
        took, _ = _times(["diff", *map(str, sides), "--explain"], folder, times)
        longest = max(longest, took)
        rows.append((f"100,000 operators a side, {what}", f"{took:.2f}", "", ""))
    samples = [str(SAMPLES / "gpt" / "run.memprof")] * 2
    slowest, is_torch_free = 0.0, True
    for what, words in (("memprof diff --help", ["diff", "--help"]), ("two of the sample GPT", ["diff", *samples])):
        took, has_torch = _times(words, folder, times)
        command = [sys.executable, "-c", _RUN, *words]
        imports = statistics.median(sum(imports_of(command, folder).values()) for _ in range(times)) / 1e6
        slowest, is_torch_free = max(slowest, imports), is_torch_free and not has_torch
        rows.append((what, f"{took:.2f}", f"{imports:.2f}", "yes" if has_torch else "no"))
    return Section(
        "Diff time",
        "Medians of whole processes, from start to end; imports by `-X importtime`, which slows them a little.",
        ("diff", "seconds", "of them imports", "torch imported"),
        rows,
        Bar(
            f"100,000 operators within {_DIFF_S:.0f} s, imports within {_IMPORT_S} s and without torch",
            f"{longest:.2f} s, {slowest:.2f} s",
            passed=longest <= _DIFF_S and slowest <= _IMPORT_S and is_torch_free,
        ),
    )


def _times(words: list[str], folder: Path, times: int) -> tuple[float, bool]:
    """Returns the median seconds of a run of memprof, and whether torch was imported."""
    taken = []
    for _ in range(times):
        started = time.monotonic()
        done = run([sys.executable, "-c", _RUN, *words], folder)
        taken.append(time.monotonic() - started)
    told = json.loads(done.stderr.decode().splitlines()[-1])
    if told["status"]:
        raise RuntimeError(f"memprof {' '.join(words)} ended with {told['status']}")
    return statistics.median(taken), bool(told["has_torch"])
