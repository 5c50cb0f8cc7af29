"""Snapshots and profilers' traces with something wrong in them: a sound recording or one sentence; nothing is run."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

from memprof.trace.importers.importing import import_file
from memprof.trace.schema import Steps
from memprof.trace.store import Trace, write_trace
from tests.fuzz.limits import bounded_memory, outcome
from tests.trace.importers.test_kineto import job
from tests.trace.importers.writing import small_job

_CASES = 120
_MARK = "memprof-was-run"

#: What stands where something else belongs, in snapshots.
_WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**62,
    2**63,
    -(2**63),
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x" * 3_000,
    "alloc",
    "\x1b[2J\n",
    "\ud800",
    b"bytes",
    [],
    {},
    [[]],
    {"a": 1},
    (0, 0),
)


def _changed(value: Any, draw: random.Random) -> Any:
    """Returns a structure with something in it replaced, doubled, left out or in another order."""
    if isinstance(value, dict) and value and draw.random() < 0.92:
        key = draw.choice(list(value))
        if draw.random() < 0.1:
            return {name: one for name, one in value.items() if name != key}
        return {**value, key: _changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        place, how = draw.randrange(len(value)), draw.random()
        if how < 0.1:
            return value[:place] + value[place + 1 :]
        if how < 0.2:
            return [*value, *value[place:]]
        if how < 0.3:
            return draw.sample(value, len(value))
        return [*value[:place], _changed(value[place], draw), *value[place + 1 :]]
    return draw.choice(_WRONG)


def _import(path: Path, written: Path) -> None:
    """Imports a file; what comes in is written, opened and checked."""
    write_trace(written, import_file(path).ranks)
    trace = Trace.open(written)
    for rank in trace.ranks:
        one = trace.rank_trace(rank)
        for number in one.table(Steps).step.tolist():
            one.step(number).check()


def test_snapshots(tmp_path: Path) -> None:
    """The structure of a snapshot changed anywhere, in every protocol."""
    path, outcomes = tmp_path / "snapshot.pickle", []
    with bounded_memory():
        for seed in range(_CASES):
            draw = random.Random(seed)
            content: Any = small_job()
            for _ in range(draw.randint(1, 3)):
                content = _changed(content, draw)
            path.write_bytes(pickle.dumps(content, draw.choice([2, 3, 4, 5])))
            outcomes.append(outcome(f"{seed}", lambda: _import(path, tmp_path / "run.memprof")))
    assert _CASES // 10 < outcomes.count("fine") < _CASES * 9 // 10


def test_profiler_traces(tmp_path: Path) -> None:
    """The structure of a profiler's trace changed anywhere."""
    path, outcomes = tmp_path / "trace.json", []
    with bounded_memory():
        for seed in range(_CASES):
            draw = random.Random(seed)
            content: Any = {"traceEvents": job(), "baseTimeNanoseconds": 1_700_000_000_000_000_000}
            for _ in range(draw.randint(1, 4)):
                content = _changed(content, draw)
            text = json.dumps(content, default=repr)
            if draw.random() < 0.1:
                place = draw.randrange(len(text))
                text = text[:place] + draw.choice(["\0", "NaN", "[" * 9_999, "9" * 5_000, "}", "\x1b"]) + text[place:]
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
            outcomes.append(outcome(f"{seed}: {text[:200]}", lambda: _import(path, tmp_path / "run.memprof")))
    assert outcomes.count("fine") > _CASES // 20


#: Parts of pickles that ask for something to be run, and of such as are fine.
_HOSTILE = (
    b"cos\nsystem\n",
    b"cbuiltins\neval\n",
    b"\x8c\x02os\x8c\x06system\x93",
    b"(S'touch memprof-was-run'\nios\nsystem\n",
    b"(cos\nsystem\nS'touch memprof-was-run'\no",
    b"X\x18\x00\x00\x00touch memprof-was-run   \x85R",
    b"R",
    b"b",
    b"\x81",
    b"\x92",
    b"\x82\x01",
    b"\x83\x01\x00",
    b"\x84\x01\x00\x00\x00",
    b"Pid\n",
    b"\x8c\x01aQ",
    b"\x97",
    b"\x98",
)
_PLAIN = (
    b"}",
    b"]",
    b"(",
    b"K\x01",
    b"\x8c\x01a",
    b"N",
    b"\x94",
    b"h\x00",
    b"u",
    b"e",
    b"s",
    b"a",
    b"\x88",
    b"0",
    b"2",
)


def test_pickles_that_ask_to_be_run(tmp_path: Path, monkeypatch: Any) -> None:
    """Opcodes that look names up and call them, among others, in any order: refused, and nothing is run."""
    monkeypatch.chdir(tmp_path)
    path, outcomes = tmp_path / "snapshot.pickle", []
    with bounded_memory():
        for seed in range(_CASES):
            draw = random.Random(seed)
            parts = draw.choices(_PLAIN, k=draw.randint(0, 12))
            for _ in range(draw.randint(1, 3)):
                parts.insert(draw.randint(0, len(parts)), draw.choice(_HOSTILE))
            start = bytes([0x80, draw.choice([2, 3, 4, 5])]) if draw.random() < 0.95 else b""
            path.write_bytes(start + b"".join(parts) + b".")
            outcomes.append(outcome(f"{seed}: {parts}", lambda: import_file(path)))
    assert "fine" not in outcomes
    assert not (tmp_path / _MARK).exists()
