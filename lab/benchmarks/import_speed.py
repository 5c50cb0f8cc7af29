"""Time to import a large memory snapshot, compared with loading it and with torch's own processing."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from lab.benchmarks.recording import run_for_json
from lab.benchmarks.section import Section, verdict

SNAPSHOTS = Path(__file__).resolve().parents[3] / "shared" / "data" / "snapshots"
_MEGABYTES = 100
_MOST_SECONDS = 30

#: Each is a process of its own, so that peaks of memory do not mix: what it does, and how it does it.
_PROGRAMS = {
    "pickle.load, which runs whatever the file holds": (
        "import pickle\nwith open(path, 'rb') as file:\n    loaded = pickle.load(file)\n"
    ),
    "pickle.load and torch.cuda._memory_viz.trace": (
        "import pickle\nfrom torch.cuda import _memory_viz\nstart = time.monotonic()\n"
        "with open(path, 'rb') as file:\n    loaded = pickle.load(file)\ntext = _memory_viz.trace(loaded)\n"
    ),
    "pickle.load and torch.cuda._memory_viz.trace_plot (a page that a browser then processes)": (
        "import pickle\nfrom torch.cuda import _memory_viz\nstart = time.monotonic()\n"
        "with open(path, 'rb') as file:\n    loaded = pickle.load(file)\ntext = _memory_viz.trace_plot(loaded)\n"
    ),
    "memprof: checked, loaded, sorted into tables": (
        "from memprof.trace.importers import import_file\nstart = time.monotonic()\nimported = import_file(path)\n"
    ),
    "memprof: the same, and written": (
        "from memprof.trace.importers import import_file\nfrom memprof.trace.store import write_trace\n"
        "start = time.monotonic()\nimported = import_file(path)\nwrite_trace(path + '.memprof', imported.ranks)\n"
    ),
}
_AROUND = (
    "import json, resource, sys, time\npath = sys.argv[1]\nstart = time.monotonic()\n{program}"
    "seconds = time.monotonic() - start\n"
    "print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))\n"
)


def measure(folder: Path, *, quick: bool) -> Section:
    """Times each program on a snapshot that was made large by repetition."""
    title = "Importing a memory snapshot"
    if not SNAPSHOTS.is_dir():
        return Section(title, f"Not measured: there is no folder {SNAPSHOTS}.", ("program",), ())
    path = folder / "large.pickle"
    entries = make_large(path, (5 if quick else _MEGABYTES) * 1_000_000)
    rows, seconds = [], {}
    for name, program in _PROGRAMS.items():
        took, peak = min(_run(program, path, folder) for _ in range(1 if quick else 2))
        seconds[name] = took
        rows.append((name, f"{took:.1f}", f"{peak / 1e6:,.0f}"))
    size = path.stat().st_size
    last = list(seconds)[-1]
    return Section(
        title,
        f"A snapshot of {size / 1e6:,.0f} MB with {entries:,} entries, made by repeating a real one; the better of "
        "two runs, each in its own process. Times exclude importing torch and memprof.",
        ("program", "seconds", "peak memory, MB"),
        tuple(rows),
        verdict(f"100 MB are imported in {_MOST_SECONDS} s at most", passed=seconds[last] <= _MOST_SECONDS),
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


def _run(program: str, path: Path, folder: Path) -> tuple[float, int]:
    seconds, peak = run_for_json([sys.executable, "-c", _AROUND.format(program=program), str(path)], folder)
    return seconds, peak
