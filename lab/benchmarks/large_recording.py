"""Time and memory for a recording of ten million allocations and frees: writing, opening, reporting, exporting it."""

from __future__ import annotations

import sys
from pathlib import Path

from lab.benchmarks.recording import run_for_json
from lab.benchmarks.section import Section, verdict
from tests.synthetic import write_synthetic

_EVENTS = 10_000_000
_MOST_SECONDS, _MOST_MEGABYTES = 10.0, 1074
_WRITE = (
    "from pathlib import Path\nfrom memprof.trace.store import Trace, write_trace\nfrom memprof.trace.schema import *\n"
    "trace = Trace.open('large.memprof')\n"
    "tables = {kind: trace.table(kind) for kind in (Modules, Stacks, Steps, Ops, Storages, Saved)}\n"
    "start = time.process_time()\nwrite_trace(Path('again.memprof'), [(trace.manifest, tables)])\n"
)
_OPEN = (
    "from memprof.trace.store import Trace\nfrom memprof.replay.history import History\nstart = time.process_time()\n"
    "history = History(Trace.open('large.memprof'))\nhistory.alive(history.peak())\n"
)
_COMMAND = "from memprof.cli.main import main\nassert main({words!r}) == 0\n"
_EXPORT = ("export", "large.memprof", "-f", "--to")
#: Each is a process of its own, so that peaks of memory do not mix.
_PROGRAMS = {
    "write the file from tables in memory (tables included)": _WRITE,
    "open it: live bytes at every operator, and what is alive at the peak": _OPEN,
    "memprof report": _COMMAND.format(words=["report", "large.memprof"]),
    "memprof export --to perfetto": _COMMAND.format(words=[*_EXPORT, "perfetto", "-o", "large.json"]),
    "memprof export --to snapshot": _COMMAND.format(words=[*_EXPORT, "snapshot", "-o", "large.pickle"]),
    "memprof export --to parquet": _COMMAND.format(words=[*_EXPORT, "parquet", "-o", "tables"]),
}
_AROUND = (
    "import json, time\nfrom pathlib import Path\nstart = time.process_time()\n{program}"
    "seconds = time.process_time() - start\n"
    # Unlike getrusage's, this peak does not include what the process that started this one had.
    "lines = Path('/proc/self/status').read_text().splitlines()\n"
    "peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith('VmHWM'))\n"
    "print()\nprint(json.dumps([seconds, peak]))\n"
)


def measure(folder: Path, *, quick: bool) -> Section:
    """Runs each program on a synthetic recording."""
    events = 100_000 if quick else _EVENTS
    write_synthetic(folder / "large.memprof", events)
    rows, figures = [], []
    for name, program in _PROGRAMS.items():
        seconds, peak = run_for_json([sys.executable, "-c", _AROUND.format(program=program)], folder)
        figures.append((seconds, peak / 1e6))
        rows.append((name, f"{seconds:.1f}", f"{peak / 1e6:,.0f}"))
    is_met = all(seconds <= _MOST_SECONDS and peak <= _MOST_MEGABYTES for seconds, peak in figures)
    return Section(
        "A large recording",
        f"A synthetic recording of {events:,} allocations and frees, all of different sizes; processor time and "
        "the most resident memory, each in a process of its own.",
        ("program", "seconds", "peak memory, MB"),
        tuple(rows),
        verdict(f"{_EVENTS:,} events in {_MOST_SECONDS:.0f} s and 1 GiB at most", passed=is_met),
    )
