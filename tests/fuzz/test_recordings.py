"""Recordings with something wrong in them, through everything that reads a recording: a result or one sentence."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from memprof.trace.schema import TABLES
from memprof.trace.store import Trace
from tests.fuzz.consumers import CHEAP, COSTLY
from tests.fuzz.limits import bounded_memory, outcome
from tests.fuzz.recordings import Base, corrupt

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


@pytest.mark.slow
def test_many_damaged_recordings(bases: list[Base], tmp_path: Path) -> None:
    """The same with more cases, each through several readers."""
    run(bases, tmp_path / "run.memprof", range(100_000, 100_000 + _SLOW_CASES), readers=3, costly=True)
