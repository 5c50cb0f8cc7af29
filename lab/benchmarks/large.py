"""Time and memory for what is large: a snapshot of 100 MB, ten million allocations and frees."""

from __future__ import annotations

import pickle
from pathlib import Path

from lab.benchmarks.recording import ROOT, measure_program
from lab.benchmarks.section import Section, verdict
from tests.synthetic import write_synthetic

SNAPSHOTS = ROOT.parent / "shared" / "data" / "snapshots"
_MEGABYTES, _IMPORT_S = 100, 30
_LOAD = "with open(sys.argv[1], 'rb') as file:\n    loaded = pickle.load(file)\n"
_IMPORT = "imported = import_file(sys.argv[1])\n"
_VIZ = "import pickle\nfrom torch.cuda import _memory_viz"
_IMPORTER = "from memprof.trace.importers import import_file\nfrom memprof.trace.store import write_trace"
#: What each does, what it needs to import before, and how it does it.
_READERS = {
    "pickle.load, which runs whatever the file holds": ("import pickle", _LOAD),
    "pickle.load and torch.cuda._memory_viz.trace": (_VIZ, f"{_LOAD}text = _memory_viz.trace(loaded)\n"),
    "pickle.load and torch.cuda._memory_viz.trace_plot (a page that a browser then processes)": (
        _VIZ,
        f"{_LOAD}text = _memory_viz.trace_plot(loaded)\n",
    ),
    "memprof: checked, loaded, sorted into tables": (_IMPORTER, _IMPORT),
    "memprof: the same, and written": (
        _IMPORTER,
        f"{_IMPORT}write_trace(sys.argv[1] + '.memprof', imported.ranks)\n",
    ),
}

_EVENTS, _MOST_SECONDS, _MOST_MEGABYTES = 10_000_000, 10.0, 1074
_READ_TABLES = """
from pathlib import Path
from memprof.trace.store import Trace, write_trace
from memprof.trace.schema import *
trace = Trace.open("large.memprof")
tables = {kind: trace.table(kind) for kind in (Modules, Stacks, Steps, Ops, Storages, Saved)}
"""
_OPENERS = "from memprof.trace.store import Trace\nfrom memprof.replay.history import History"
_OPEN = """
history = History(Trace.open("large.memprof"))
history.alive(history.peak())
"""
#: The words of memprof for each figure of the large recording.
_COMMANDS = {
    "memprof report": ("report",),
    "memprof export --to perfetto": ("export", "-f", "--to", "perfetto", "-o", "large.json"),
    "memprof export --to snapshot": ("export", "-f", "--to", "snapshot", "-o", "large.pickle"),
    "memprof export --to parquet": ("export", "-f", "--to", "parquet", "-o", "tables"),
}


def import_speed(folder: Path, *, quick: bool) -> Section:
    """Times each way to read a snapshot that was made large by repetition."""
    title = "Importing a memory snapshot"
    if not SNAPSHOTS.is_dir():
        return Section(title, f"Not measured: there is no folder {SNAPSHOTS}.", ("program",), ())
    path = folder / "large.pickle"
    entries = make_large(path, (5 if quick else _MEGABYTES) * 1_000_000)
    rows, seconds = [], 0.0
    for name, (before, program) in _READERS.items():
        runs = [measure_program(program, folder, path, before=before) for _ in range(1 if quick else 2)]
        seconds, peak = min(runs)
        rows.append((name, f"{seconds:.1f}", f"{peak / 1e6:,.0f}"))
    return Section(
        title,
        f"A snapshot of {path.stat().st_size / 1e6:,.0f} MB with {entries:,} entries, made by repeating a real one; "
        "the better of two runs, each in its own process. Times exclude importing torch and memprof.",
        ("program", "seconds", "peak memory, MB"),
        rows,
        verdict(f"100 MB are imported in {_IMPORT_S} s at most", passed=seconds <= _IMPORT_S),
    )


def make_large(path: Path, size: int) -> int:
    """Writes a snapshot of about ``size`` bytes: a real job's whole history, repeated from empty each time.

    Returns:
        The entries in it.
    """
    source = next(SNAPSHOTS.glob("ZidongLiu*.pickle"))
    snapshot = pickle.loads(source.read_bytes())  # a file of ours, whose hash is known
    history = snapshot["device_traces"][0]
    alive: dict[int, dict[str, object]] = {}
    for entry in history:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = entry
        elif entry["action"] == "free_requested":
            del alive[entry["addr"]]
    emptied = [
        {**entry, "action": action} for entry in alive.values() for action in ("free_requested", "free_completed")
    ]
    again = [entry for entry in history if not entry["action"].startswith("segment")]
    repeats = max(1, round(size / source.stat().st_size))
    entries = list(history)
    for _ in range(repeats - 1):
        # As in a real file: entries are separate, the two of a free share a list of frames, and all share frames.
        copies = {id(entry["frames"]): list(entry["frames"]) for entry in (*emptied, *again)}
        entries += [{**entry, "frames": copies[id(entry["frames"])]} for entry in (*emptied, *again)]
    snapshot["device_traces"] = [entries]
    with path.open("wb") as file:
        pickle.dump(snapshot, file, protocol=4)
    return len(entries)


def large_recording(folder: Path, *, quick: bool) -> Section:
    """Writes, opens, reports and exports a synthetic recording."""
    events = 100_000 if quick else _EVENTS
    write_synthetic(folder / "large.memprof", events)
    write = "write_trace(Path('again.memprof'), [(trace.manifest, tables)])"
    programs = {
        "write the file from tables in memory (tables included)": (_READ_TABLES, write),
        "open it: live bytes at every operator, and what is alive at the peak": (_OPENERS, _OPEN),
    }
    for name, (verb, *options) in _COMMANDS.items():
        words = [verb, "large.memprof", *options]
        programs[name] = ("", f"from memprof.cli.main import main\nassert main({words!r}) == 0")
    rows, is_met = [], True
    for name, (before, program) in programs.items():
        seconds, peak = measure_program(program, folder, before=before, clock="process_time")
        is_met &= seconds <= _MOST_SECONDS and peak / 1e6 <= _MOST_MEGABYTES
        rows.append((name, f"{seconds:.1f}", f"{peak / 1e6:,.0f}"))
    return Section(
        "A large recording",
        f"A synthetic recording of {events:,} allocations and frees, all of different sizes; processor time and "
        "the most resident memory, each in a process of its own.",
        ("program", "seconds", "peak memory, MB"),
        rows,
        verdict(f"{_EVENTS:,} events in {_MOST_SECONDS:.0f} s and 1 GiB at most", passed=is_met),
    )
