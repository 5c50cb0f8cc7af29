"""Spool folders with something wrong in them: a result or one sentence, and the raw recording is never lost."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from memprof.trace.files.spool import COLUMNS, FILE_NAME, read_spool
from memprof.trace.files.spool_folder import read_spool_folder
from memprof.trace.files.spool_writer import SpoolWriter
from memprof.trace.store import Trace
from tests.fuzz.limits import bounded_memory, outcome
from tests.fuzz.recordings import NUMBERS, change_json
from tests.trace.assemble.conftest import RawJob

_CASES = 200


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """The spool of a job of two steps: forward, backward, update."""
    job = RawJob(tmp_path / "run.memprof.spool" / "process-11")
    job.modules = [[0, "", "Net", -1, 0], [1, "fc", "Linear", 0, 64]]
    job.stacks = [[-1, ["train.py:1:main"]], [0, ["train.py:9:step"]]]
    moment = 0
    for step in range(2):
        first = len(job.rows["operators"])
        for phase in (0, 1, 2):
            address = 100 * (phase + 1)
            moment += 10
            job.event(moment + 1, address, 512, 512)
            job.operator(moment, moment + 5, reads=[100], writes=[address], phase=phase, module=1, stack=0)
            job.fact(moment + 2, address, phase, "fc.weight", 1)
        for phase in (0, 1, 2):
            job.event(moment + 6 + phase, 100 * (phase + 1), -512, 0)
        job.step(step, "recorded", 60 * step, moment + 9, first, len(job.rows["operators"]))
    job.write()
    folder = job.folder.parent
    (folder / "launch.json").write_text(json.dumps({"command": ["train.py"], "target": "train.py", "started_us": 1.0}))
    (folder / "exit.json").write_text(json.dumps({"returncode": 0, "ended_us": 2.0}))
    return folder


def rewrite(folder: Path, rows: dict[str, Any], records: dict[str, list[Any]]) -> None:
    """Writes a raw recording anew, with checksums that fit."""
    (folder / FILE_NAME).unlink()
    writer = SpoolWriter(folder)
    for stream in ("start", "names", "tensors", "modules", "stacks", "epochs"):
        for record in records.get(stream, []):
            writer.write_record(stream, record)
    for stream, values in rows.items():
        writer.write_rows(stream, array("q", values.reshape(-1).tolist()))
    for stream, kept in records.items():
        if stream not in ("start", "names", "tensors", "modules", "stacks", "epochs"):
            for record in kept:
                writer.write_record(stream, record)
    writer.close()


def damage(rows: dict[str, Any], records: dict[str, list[Any]], draw: random.Random) -> str:
    """Changes numbers, rows or records; returns what was done."""
    stream = draw.choice([name for name, values in rows.items() if len(values)])
    how = draw.random()
    values = rows[stream]
    if how < 0.5:
        place, column = draw.randrange(len(values)), draw.randrange(len(COLUMNS[stream]))
        values[place, column] = draw.choice(NUMBERS)
        return f"{stream}.{COLUMNS[stream][column]}[{place}] = {values[place, column]}"
    if how < 0.6:
        rows[stream] = values[: draw.randrange(len(values))]
        return f"{stream} cut"
    if how < 0.7:
        rows[stream] = values[draw.sample(range(len(values)), len(values))]
        return f"{stream} shuffled"
    name = draw.choice(list(records))
    place = draw.randrange(len(records[name]))
    records[name][place] = change_json(records[name][place], draw)
    return f"{name}[{place}] = {str(records[name][place])[:80]}"


def test_spools(spool: Path) -> None:
    """Numbers out of range, rows and records missing, of another kind or order; cut anywhere; damaged JSON beside."""
    process = spool / "process-11"
    whole, launch = (process / FILE_NAME).read_bytes(), (spool / "launch.json").read_text()
    outcomes = []

    def read() -> None:
        Trace.of(read_spool_folder(spool), spool).steady_step()

    with bounded_memory():
        for seed in range(_CASES):
            draw = random.Random(seed)
            (process / FILE_NAME).write_bytes(whole)
            (spool / "launch.json").write_text(launch)
            how = draw.random()
            if how < 0.1:
                done = "cut"
                (process / FILE_NAME).write_bytes(whole[: draw.randrange(len(whole))])
            elif how < 0.2:
                done = "launch.json"
                (spool / "launch.json").write_text(json.dumps(change_json(json.loads(launch), draw)))
            else:
                read_back = read_spool(process)
                rows = {name: values.copy() for name, values in read_back.rows.items()}
                done = ", ".join(damage(rows, read_back.records, draw) for _ in range(draw.choice([1, 1, 2, 3])))
                rewrite(process, rows, read_back.records)
            outcomes.append(outcome(f"{seed}: {done}", read))
    assert _CASES // 10 < outcomes.count("fine") < _CASES * 9 // 10
