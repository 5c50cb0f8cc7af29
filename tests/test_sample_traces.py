"""The sample traces in the repository: they open, are valid, and match their expected figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memprof.replay.live import alive_at, live_bytes, peak_op
from memprof.trace.store import Trace

SAMPLES = Path(__file__).parents[1] / "sample_traces"
NAMES = ("gpt", "gpt-h200", "lstm", "resnet")


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest) -> Path:
    return SAMPLES / request.param


@pytest.fixture
def expected(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "expected.json").read_text())


@pytest.fixture
def trace(folder: Path) -> Trace:
    return Trace.open(folder / "run.memprof")


def test_every_sample_is_complete() -> None:
    """Each sample has its script, its trace and its figures, and none is missing here."""
    assert sorted(script.parent.name for script in SAMPLES.glob("*/train.py")) == sorted(NAMES)
    for name in NAMES:
        assert {path.name for path in (SAMPLES / name).iterdir()} >= {"train.py", "run.memprof", "expected.json"}


def test_a_sample_is_small(folder: Path) -> None:
    """A sample takes at most 300 kB of everybody's clone."""
    assert (folder / "run.memprof").stat().st_size <= 300_000


def test_every_step_is_sound(trace: Trace) -> None:
    """Ids resolve, uses lie inside lives, and the replayed bytes equal the allocator's counter."""
    for number in trace.recorded_steps:
        trace.step(number).check()


def test_the_replay_finds_the_expected_peak(trace: Trace, expected: dict[str, Any]) -> None:
    """Step, operator, phase and bytes of the peak are those expected of the trace."""
    step = trace.steady_step()
    op = peak_op(step)
    found = (step.number, step.ops.name[op], step.ops.phase[op], int(live_bytes(step).during[op]))
    peak = expected["peak"]
    assert found == (peak["step"], peak["op"], peak["phase"], peak["allocated_bytes"])


def test_operators_are_as_many_as_expected(trace: Trace, expected: dict[str, Any]) -> None:
    """No recorded step has lost an operator."""
    operators = {str(number): len(trace.step(number).ops) for number in trace.recorded_steps}
    assert operators == expected["operators"]


def test_categories_sum_to_the_peak(expected: dict[str, Any]) -> None:
    """The parts written down are the whole."""
    assert sum(expected["by_category"].values()) == expected["peak"]["allocated_bytes"]


def test_at_most_a_hundredth_is_unknown(trace: Trace) -> None:
    """At the peak, at most 1 % of the bytes are of unknown category."""
    step = trace.steady_step()
    op = peak_op(step)
    unknown = alive_at(step, op) & (step.storages.category == "unknown")
    assert step.storages.allocated_bytes[unknown].sum() <= 0.01 * live_bytes(step).during[op]


def test_the_report_says_the_same(folder: Path, expected: dict[str, Any]) -> None:
    """`memprof report --json` shows the expected peak and categories of the trace."""
    command = [sys.executable, "-m", "memprof.cli.main", "report", "--json", str(folder / "run.memprof")]
    report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert {key: report["peak"][key] for key in expected["peak"]} == expected["peak"]
    assert report["at_peak"]["by_category"] == expected["by_category"]
