"""Compares the categories of `memprof attach --dump` with those of a recording from the start, at the same place.

python -m lab.attach.agreement [--out FOLDER] [--kind TEXT]...

Each job runs twice, recorded and attached to, and stops before a backward and after an update. Storages are matched by
bytes; those that the recording lacks, such as what loader workers share, or calls unknown do not count. For each place,
the table has the share of the dump's bytes whose category is the recording's, and of the rest what the dump calls
unknown and what it calls otherwise. The exit code is 1 where less than 98 % agree or more than 0.1 % differ.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from lab.attach.kinds import KINDS, PROGRAMS, Kind
from lab.attach.programs.pinned import MARKS
from lab.attach.running import attached
from lab.zoo_catalog import ZOO
from lab.zoo_runs import environment
from memprof.trace.schema import NONE, Storages
from memprof.trace.store import Trace

_NAMES = (
    *("zoo: convolutions", "zoo: two optimizers", "Trainer", "Lightning", "Accelerate", "DataLoader workers"),
    *("compiled, aot_eager", "checkpointed backward", "sparse embeddings"),
)
_MORE = ("translation_transformer", "unet", "vae", "word_language_model", "gru_seq2seq", "mixture_of_experts")
JOBS = (
    *(kind for kind in KINDS if kind.name in _NAMES),
    *(Kind(name.replace("_", " "), (str(ZOO / f"{name}.py"),)) for name in _MORE),
)
_NUMBER = 6
_LEAST, _MOST_OTHER, _WAIT_S = 0.98, 0.001, 600.0
_Sizes = Counter[tuple[int, str]]  # bytes and category


def main() -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m lab.attach.agreement", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/attach-agreement"), help="folder for what runs leave")
    parser.add_argument("--kind", action="append", default=[], help="only jobs whose name contains this (repeatable)")
    args = parser.parse_args()
    print("| job | place | bytes | agree | unknown | differ |\n|---|---|--:|--:|--:|--:|", flush=True)
    failed = False
    for job in JOBS:
        if args.kind and not any(text in job.name for text in args.kind):
            continue
        home = args.out.resolve() / "".join(each if each.isalnum() else "-" for each in job.name)
        recorded, dumped = _recorded(job, home), _dumped(job, home)
        for place in MARKS:
            total = sum(size * count for (size, _), count in dumped[place].items())
            agree = sum(size * count for (size, _), count in (recorded[place] & dumped[place]).items())
            left, missing = dumped[place] - recorded[place], recorded[place] - dumped[place]
            unknown = sum(size * count for (size, category), count in left.items() if category == "unknown")
            beyond = 0  # bytes missing from the recording (loader workers' memory), or unknown there
            for size in {size for size, _ in left}:
                named = sum(count for (one, category), count in left.items() if one == size and category != "unknown")
                known = sum(
                    count for (one, category), count in missing.items() if one == size and category != "unknown"
                )
                beyond += size * max(0, named - known)
            other = total - agree - unknown - beyond
            total -= beyond
            failed |= agree < _LEAST * total or other > _MOST_OTHER * total
            shares = (f"{100 * size / total:.2f} %" for size in (agree, unknown, other))
            print(f"| {job.name} | {place} | {total:,} | {' | '.join(shares)} |", flush=True)
            lines = [f"{sign} {key} x {count}" for sign, rest in (("+", left), ("-", missing))
                     for key, count in sorted(rest.items(), reverse=True)]  # fmt: skip
            (home / f"differences.{place}").write_text("\n".join(lines) + "\n")
    return int(failed)


def _start(job: Kind, home: Path, before: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    settings = {
        **environment(home),
        "LAB_READY": str(home / "ready"),
        "LAB_DONE": str(home / "done"),
        "LAB_PACE": "0",
        "PYTHONPATH": os.pathsep.join([str(PROGRAMS), str(Path.cwd())]),
    }
    command = [sys.executable, *before, str(PROGRAMS / "pinned.py"), str(_NUMBER), *job.words]
    with (home / "output").open("wb") as out:
        return subprocess.Popen(command, cwd=home, env=settings, stdout=out, stderr=out, stdin=subprocess.DEVNULL)


def _recorded(job: Kind, home: Path) -> dict[str, _Sizes]:
    """Returns what a recording has alive while each mark is."""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    for place in MARKS:
        (home / f"done.{place}").touch()
    output = home / "run.memprof"
    options = ("-q", "-f", "-o", str(output), "--skip", "2", "--steps", "6")
    _start(job, home, ("-m", "memprof", "record", *options)).wait(_WAIT_S)
    rows = Trace.open(output).table(Storages)
    found = {}
    for place, mark in MARKS.items():
        at = int(rows.created_op_id[rows.requested_bytes == mark][0])
        alive = (rows.created_op_id < at) & ((rows.freed_op_id == NONE) | (rows.freed_op_id > at))
        alive &= rows.device == "cpu"
        found[place] = Counter(zip(rows.requested_bytes[alive].tolist(), rows.category[alive].tolist(), strict=True))
    return found


def _dumped(job: Kind, home: Path) -> dict[str, _Sizes]:
    """Returns what attaching to a run of its own finds at each place."""
    for place in MARKS:
        (home / f"done.{place}").unlink()
        (home / f"ready.{place}").unlink()
    process, found = _start(job, home), {}
    try:
        for place in MARKS:
            deadline = time.monotonic() + _WAIT_S
            while not (home / f"ready.{place}").exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{job.name} came to no {place}: see {home / 'output'}")
                time.sleep(0.02)
            output = home / f"dump.{place}"
            attach = attached(["attach", str(process.pid), "--dump", "--json", "--rows", "1000000"], output)
            attach.join(_WAIT_S)
            (home / f"done.{place}").touch()
            text = output.read_text()  # behind what was waited for
            (one,) = json.loads(text[text.index("{") :])["processes"]
            (device,) = one["devices"]
            largest = [each for each in device["largest"] if each["bytes"] != MARKS[place]]
            found[place] = Counter((each["bytes"], each["category"]) for each in largest)
        process.wait(_WAIT_S)
    finally:
        process.kill()
    return found


if __name__ == "__main__":
    sys.exit(main())
