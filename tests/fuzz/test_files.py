"""Recordings, spools, plans, baselines and manifests with something wrong: a result or one sentence."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from memprof.analysis.diff.comparison import compare
from memprof.analysis.diff.summary import read_summary, summarise, summary_to_json
from memprof.errors import BadInputError
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import format_plan, read_plan
from memprof.policies.registry import policy_types
from memprof.trace.files.spool import COLUMNS, FILE_NAME, read_spool
from memprof.trace.files.spool_folder import read_spool_folder
from memprof.trace.files.spool_writer import SpoolWriter
from memprof.trace.manifest import Manifest
from memprof.trace.schema import TABLES
from memprof.trace.store import Trace
from tests.fuzz.consumers import CHEAP, COSTLY
from tests.fuzz.limits import bounded_memory, outcome
from tests.fuzz.recordings import NUMBERS, Base, change_json, corrupt
from tests.trace.assemble.conftest import RawJob

_FOLDER = Path(__file__).parents[2]


_BASES = ("sample_traces/lstm/run.memprof", "tests/trace/golden/schema-1.memprof")


#: Cases of a part of the fast tests, of which there are six, and of the slow test.
_CASES, _PARTS, _SLOW_CASES = 60, 6, 4_000


@pytest.fixture(scope="module")
def bases() -> list[Base]:
    opened = [Trace.open(_FOLDER / path) for path in _BASES]
    return [Base(trace.manifest, {kind: trace.table(kind) for kind in TABLES}) for trace in opened]


def read_all(trace: Trace) -> None:
    for kind in TABLES:
        trace.table(kind)


def run(bases: list[Base], path: Path, seeds: range, readers: int, *, costly: bool = False) -> list[str]:
    """Runs cases; returns what came of each."""
    consumers = {"tables": read_all, **CHEAP, **(COSTLY if costly else {})}
    outcomes = []
    with bounded_memory():
        for seed in seeds:
            draw = random.Random(seed)
            done = corrupt(bases[draw.random() < 0.7], path, draw)
            outcomes += [
                outcome(f"{seed}: {name} after {done}", lambda name=name: consumers[name](Trace.open(path)))
                for name in draw.sample(list(consumers), readers)
            ]
    return outcomes


@pytest.mark.parametrize("part", range(_PARTS))
def test_a_damaged_recording_gives_a_result_or_a_sentence(part: int, bases: list[Base], tmp_path: Path) -> None:
    """Wrong types, values, orders, missing tables and columns, damaged bytes: each reader returns a result or reports
    the error."""
    outcomes = run(bases, tmp_path / "run.memprof", range(part * _CASES, (part + 1) * _CASES), readers=1)
    # Neither all refused nor all let through: the cases are of both kinds.
    assert _CASES // 10 < outcomes.count("fine") < _CASES * 9 // 10


def test_a_device_whose_number_is_none_is_no_fault(bases: list[Base], tmp_path: Path) -> None:
    """Case 481 exports a snapshot of a device whose name ends in `:x`."""
    assert run(bases, tmp_path / "run.memprof", range(481, 482), readers=1)


@pytest.mark.slow
def test_many_damaged_recordings(bases: list[Base], tmp_path: Path) -> None:
    """The same with more cases, each through several readers."""
    run(bases, tmp_path / "run.memprof", range(100_000, 100_000 + _SLOW_CASES), readers=3, costly=True)


_SPOOLS = 200


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
        for seed in range(_SPOOLS):
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
    assert _SPOOLS // 10 < outcomes.count("fine") < _SPOOLS * 9 // 10


_SAMPLE = Path(__file__).parents[2] / "sample_traces" / "lstm" / "run.memprof"


_TEXTS = 900


_VALUES = (
    "1",
    "-1",
    "9" * 5_000,
    "0x" + "f" * 4_000,
    "1e400",
    "nan",
    "-inf",
    "true",
    '""',
    '"\\u0000"',
    '"\\u001b[2J"',
    '"a.*b["',
    "'**'",
    "[]",
    "[1, 'a', [2]]",
    "{}",
    "{a = {b = {c = 1}}}",
    "1979-05-27",
    "'" + "x" * 3_000 + "'",
    "[" * 2_000 + "]" * 2_000,
    "2",
    "'8GiB'",
    "'fsdp'",
)


def _plan_text(draw: random.Random) -> str:
    types = {kind.name: kind for kind in policy_types()}
    lines = []
    for _ in range(draw.randint(1, 3)):
        name = draw.choice([*types, "prediction", "nobody", "a.b", '"\\u001b"'])
        lines.append(f"[[{name}]]" if draw.random() < 0.2 else f"[{name}]")
        fields = list(getattr(types.get(name), "__dataclass_fields__", {})) or ["key"]
        names = [*fields, "nokey", '""']
        lines += [f"{draw.choice(names)} = {draw.choice(_VALUES)}" for _ in range(draw.randint(0, 3))]
    text = draw.choice(["\n", "\r\n"]).join(lines)
    if draw.random() < 0.2:
        place = draw.randrange(len(text) + 1)
        text = text[:place] + draw.choice(["\0", "\x1b", '"""', "]", "=", "\ud800", "\ufeff", "\r", "#"]) + text[place:]
    return draw.choice(["", "", "", "\ufeff"]) + text


def test_plans(tmp_path: Path) -> None:
    """Tables and keys that make no sense, numbers of 5,000 digits, nesting without end, other encodings."""
    path, outcomes = tmp_path / "plan.toml", []

    def read() -> None:
        plan: Plan = read_plan(path)
        format_plan(plan)
        plan.describe()

    with bounded_memory():
        for seed in range(_TEXTS):
            draw = random.Random(seed)
            text = _plan_text(draw)
            encoding = draw.choice(["utf-8", "utf-8", "utf-8", "utf-16", "latin-1"])
            path.write_bytes(text.encode(encoding, "surrogatepass" if "utf" in encoding else "replace"))
            outcomes.append(outcome(f"{seed}: {text[:300]!r}", read))
    assert outcomes.count("fine") < _TEXTS * 9 // 10


@pytest.fixture(scope="module")
def baseline() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(json.dumps(summary_to_json(summarise(Trace.open(_SAMPLE)))))
    return record


def _json_text(record: Any, draw: random.Random) -> str:
    text = json.dumps(record)
    how = draw.random()
    if how < 0.06:
        place = draw.randrange(len(text))
        return (
            text[:place] + draw.choice(["NaN", "\0", "\x1b", "[" * 50_000, "}", "1" * 5_000, "\ufeff"]) + text[place:]
        )
    if how < 0.09:
        return text[: draw.randrange(len(text))]
    if how < 0.11:
        return text.replace("{", '{"memprof_summary": 1, "memprof_summary": 1,', 1)
    return text


def test_baselines(baseline: dict[str, Any]) -> None:
    """Values of another kind, far too large, missing; doubled keys; what opens is compared with the original."""
    whole = read_summary(json.dumps(baseline), "whole")
    outcomes = []
    with bounded_memory():
        for seed in range(_TEXTS):
            draw = random.Random(seed)
            record: Any = baseline
            for _ in range(draw.randint(1, 3)):
                record = change_json(record, draw)
            text = _json_text(record, draw)
            outcomes.append(outcome(f"{seed}", lambda text=text: compare([whole], [read_summary(text, "memory.json")])))
    assert "fine" in outcomes
    assert outcomes.count("fine") < _TEXTS * 9 // 10


def test_manifests() -> None:
    """A manifest is read, or one clause says which key is wrong."""
    whole = Trace.open(_SAMPLE).manifest.to_json()

    def read(record: dict[str, Any]) -> None:
        try:
            Manifest.from_json(record)
        except TypeError as error:  # of which the reader of the file makes a sentence
            raise BadInputError(str(error)) from None

    outcomes = []
    for seed in range(_TEXTS):
        record = change_json(whole, random.Random(seed))
        if isinstance(record, dict):
            outcomes.append(outcome(f"{seed}", lambda record=record: read(record)))
    assert outcomes.count("fine") < len(outcomes) * 3 // 4
