"""Time and memory for what is large: a snapshot of 100 MB, ten million allocations and frees, a thousand ranks."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
import struct
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

from lab.benchmarks.recording import ROOT, environment, measure_program, sample
from lab.benchmarks.section import Bar, Section, bytes_in
from memprof.launch.parent.job_process import recording_environment
from memprof.launch.parent.settings import Settings
from memprof.trace.files.spool import FILE_NAME
from memprof.trace.manifest import Machine, Manifest
from memprof.trace.store import write_trace
from tests.synthetic import Table, make_synthetic, write_synthetic

SNAPSHOTS = ROOT.parent / "shared" / "data" / "snapshots"
_MEGABYTES, _IMPORT_S = 100, 30
_LOAD = "with open(sys.argv[1], 'rb') as file:\n    loaded = pickle.load(file)\n"
_IMPORT = "imported = import_file(sys.argv[1])\n"
_VIZ = "import pickle\nfrom torch.cuda import _memory_viz"
_IMPORTER = "from memprof.trace.importers.importing import import_file\nfrom memprof.trace.store import write_trace"
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
        f"A snapshot of {path.stat().st_size / 1e6:,.0f} MB with {entries:,} entries, a real one repeated; the better "
        "of two runs, without importing torch and memprof.",
        ("program", "seconds", "peak memory, MB"),
        rows,
        Bar(f"100 MB within {_IMPORT_S} s", f"{seconds:.1f} s", passed=seconds <= _IMPORT_S),
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
        f"A synthetic recording of {events:,} allocations and frees; processor time and peak resident memory of a "
        "process each.",
        ("program", "seconds", "peak memory, MB"),
        rows,
        Bar(
            f"{_EVENTS:,} events in {_MOST_SECONDS:.0f} s and 1 GiB at most",
            f"{max(float(row[1]) for row in rows)} s, {max(bytes_in(row[2]) for row in rows):,} MB",
            passed=is_met,
        ),
    )


#: Operators of a synthetic rank, and ranks of a node.
_OPERATORS, _PER_NODE = 20_000, 8
_HEADER = struct.Struct("<4sHIIH")  # of a frame of the spool, see memprof.trace.files.spool

_PACK = """
from memprof.trace.files.pack import pack_spool
done = pack_spool(sys.argv[1], sys.argv[2])
assert len(done.ranks) == int(sys.argv[3]), done
"""
_OPEN_RANKS = "from memprof.trace.store import Trace\ntrace = Trace.open(sys.argv[1])\n"
_RANKS = "from memprof.analysis.ranks.rank_report import"
#: What is read of a job's recordings, and how, with memprof's imports in the time.
_RANK_READERS = {
    "open": _OPEN_RANKS,
    "open and worst rank": f"{_OPEN_RANKS}{_RANKS} compare_ranks\nfound = compare_ranks(trace).worst\n",
    "open and heatmap": f"{_OPEN_RANKS}{_RANKS} read_curves\nassert len(read_curves(trace).ranks)\n",
    "every operator of every rank": (
        f"from memprof.replay.live import live_bytes\n{_OPEN_RANKS}"
        "found = [live_bytes(trace.fresh(rank).fullest_step()).during.max() for rank in trace.ranks]\n"
    ),
}


def ranks(folder: Path, *, quick: bool) -> Section:
    """Packs recordings of many ranks, then opens and compares synthetic ones of twenty thousand operators a rank."""
    figures: dict[str, tuple[float, float]] = {}
    spool = _record(folder)
    for count in (8,) if quick else (8, 64):
        figures[f"pack {count} ranks of gpt"] = _pack(spool, folder, count)
    for count in (8,) if quick else (64, 1024):
        job = folder / f"job-{count}"
        job.mkdir()
        for node in range(count // _PER_NODE):
            write_trace(job / f"run.node{node}.memprof", _node(node, count))
        for name, program in _RANK_READERS.items():
            figures[f"{name}, {count:,} ranks"] = measure_program(program, folder, job)
        shutil.rmtree(job)
    seconds, memory = figures[f"open and worst rank, {count:,} ranks"]
    rows = [
        (name, f"{took:.2f} s" if took < 10 else f"{took:.0f} s", f"{held / 2**20:,.0f} MiB")
        for name, (took, held) in figures.items()
    ]
    return Section(
        "Many ranks",
        f"Packing: sample_traces/gpt once per rank. The others: synthetic, {_OPERATORS:,} operators a rank, a file for "
        f"each {_PER_NODE} ranks, a fresh process with its imports; memory is the highest resident "
        "size.",
        ("what", "time", "memory"),
        rows,
        Bar(
            "1,024 ranks: open and worst rank within 10 s and 1 GiB",
            f"{seconds:.2f} s, {memory / 2**20:,.0f} MiB",
            passed=seconds <= 10 and memory <= 2**30,
        ),
        brief=(("what", "time", "memory"), [row for row in rows if not row[0].endswith(", 64 ranks")]),
    )


def _record(folder: Path) -> Path:
    """Runs the job with the recorder in it, and leaves what it recorded unpacked."""
    spool = folder / "gpt.spool"
    spool.mkdir()
    told = recording_environment(environment(), spool, Settings(stop=True))
    subprocess.run(sample("gpt").command, env=told, check=True, stdout=subprocess.DEVNULL)
    (spool / "launch.json").write_text(json.dumps({"command": ["train.py"], "target": "train.py"}))
    (spool / "exit.json").write_text(json.dumps({"returncode": 0}))
    return spool


def _pack(spool: Path, folder: Path, ranks: int) -> tuple[float, float]:
    copies = folder / f"copies-{ranks}"
    copies.mkdir()
    for name in ("launch.json", "exit.json"):
        shutil.copy(spool / name, copies)
    (process,) = spool.glob("process-*/")
    data = (process / FILE_NAME).read_bytes()
    for rank in range(ranks):
        into = copies / f"process-{100_000 + rank}"
        into.mkdir()
        (into / FILE_NAME).write_bytes(_as_rank(data, rank, ranks))
    return measure_program(_PACK, folder, copies, folder / f"packed-{ranks}.memprof", ranks)


def _as_rank(data: bytes, rank: int, ranks: int) -> bytes:
    """Returns a raw recording with another rank in the record that it starts with."""
    magic, name_length, length, _, last = _HEADER.unpack_from(data)
    end = _HEADER.size + name_length
    name, record = data[_HEADER.size : end], json.loads(data[end : end + length])
    payload = json.dumps({**record, "rank": rank, "world_size": ranks, "pid": 100_000 + rank}).encode()
    header = _HEADER.pack(magic, name_length, len(payload), zlib.crc32(name + payload), last)
    return header + name + payload + data[end + length :]


def _node(node: int, ranks: int) -> Iterator[tuple[Manifest, dict[type[Table], Table]]]:
    machine = Machine(device_name="synthetic", device_kind="cuda", memory_bytes=2**37, capacity_bytes=2**36)
    manifest = Manifest(target="train.py", world_size=ranks, machine=machine, node=f"node{node}", clock=f"clock{node}")
    for rank in range(node * _PER_NODE, (node + 1) * _PER_NODE):
        yield dataclasses.replace(manifest, rank=rank), make_synthetic(2 * _OPERATORS, seed=rank)
