"""Typical training scripts: recording does not change their output, and counts their memory exactly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lab.zoo_catalog import CASES, ZOO, Case
from lab.zoo_runs import Runs, runs_of
from memprof.replay.live import alive_at, live_bytes, peak_op
from memprof.trace.schema import Steps
from memprof.trace.step import Step
from memprof.trace.store import Trace

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="session")
def zoo_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """One folder for all workers of pytest-xdist, whose own folders lie side by side."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "zoo"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def worker_id(request: pytest.FixtureRequest) -> str:
    """The name pytest-xdist gives this process, or "master"; defined here too for runs without the plugin."""
    return getattr(request.config, "workerinput", {}).get("workerid", "master")


def _grouped(case: Case) -> Any:
    """Keeps the tests of a script to one worker: the others would wait for its runs."""
    marks = [pytest.mark.xdist_group(case.name), *([pytest.mark.slow] if case.is_slow else [])]
    return pytest.param(case, id=case.name, marks=marks)


@pytest.fixture(params=[_grouped(case) for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def runs(case: Case, zoo_folder: Path) -> Runs:
    return runs_of(case, zoo_folder)


@pytest.fixture
def trace(runs: Runs) -> Trace:
    assert runs.trace.exists(), runs.recorded.stderr.decode()
    return Trace.open(runs.trace)


def test_every_script_is_in_the_catalog() -> None:
    """No script of the zoo is forgotten, and no entry of those with several."""
    assert {case.script for case in CASES} == {path.stem for path in ZOO.glob("*.py")} - {"usual_loop"}
    for script in ("loops", "models", "techniques"):
        told = re.findall(r'^def (\w+)\(.*\n    """', (ZOO / f"{script}.py").read_text(encoding="utf-8"), re.MULTILINE)
        assert {case.arguments[0] for case in CASES if case.script == script} == set(told)


def test_job_behaves_as_without_recorder(runs: Runs) -> None:
    """Losses are equal to the last bit, stderr and the exit status are the same."""
    assert runs.plain.returncode == 0, runs.plain.stderr.decode()
    assert runs.recorded.stdout == runs.plain.stdout
    assert runs.recorded.stderr == runs.plain.stderr
    assert runs.recorded.returncode == 0
    assert runs.truth.stdout == runs.plain.stdout


def test_steps_are_recorded_whole(case: Case, trace: Trace) -> None:
    """After two skipped steps three are recorded, each with operators, sound in itself."""
    for number in trace.recorded_steps:
        step = trace.step(number)
        step.check()
        assert len(step.ops) > 0
    if case.cut != "never":
        assert _complete(trace) == case.steps


def test_a_step_is_a_round_of_all_optimizers(case: Case, trace: Trace) -> None:
    """Each step holds as many updates as the script makes in one round trip."""
    steps = trace.table(Steps)
    complete = steps.is_complete & ((steps.kind == "recorded") | (steps.kind == "warm_up"))
    assert set(steps.optimizer_updates[complete].tolist()) <= {case.updates}


def test_categories_are_known_at_the_peak(case: Case, trace: Trace) -> None:
    """At most 1 % of the bytes at the peak are of unknown category."""
    shares = {number: unknown_share(trace.step(number)) for number in trace.recorded_steps}
    print(case.name, {number: f"{share:.2%}" for number, share in shares.items()}, case.unknown)
    if not case.unknown:
        assert max(shares.values()) <= 0.01, shares


def test_peak_equals_the_allocators_own_count(case: Case, runs: Runs, trace: Trace) -> None:
    """The replayed peak of every recorded step is the peak of an unobserved process, to the byte."""
    if case.inexact:
        pytest.skip(case.inexact)
    replayed = {number: int(live_bytes(trace.step(number)).during.max()) for number in _complete(trace)}
    assert replayed == {number: true_peak(trace, runs, number) for number in replayed}


def unknown_share(step: Step) -> float:
    """Returns the part of the bytes at the peak whose category is unknown."""
    peak = peak_op(step)
    unknown = alive_at(step, peak) & (step.storages.category == "unknown")
    return float(step.storages.allocated_bytes[unknown].sum() / live_bytes(step).during[peak])


def true_peak(trace: Trace, runs: Runs, number: int) -> int:
    """Returns the peak of a step as the other process saw it, found by counting updates (or calls)."""
    steps = trace.table(Steps)
    if not runs.truth.updates:
        return runs.truth.rest_peak_bytes
    marks = steps.optimizer_updates if steps.optimizer_updates.any() else steps.is_complete.astype(int)
    first = int(marks[steps.step < number].sum())
    # A call begins its step, where an update ends it: the interval before the first call is nobody's.
    first += 0 if steps.optimizer_updates.any() else 1
    return runs.truth.peak_bytes(first, int(marks[steps.step == number][0]))


def _complete(trace: Trace) -> tuple[int, ...]:
    steps = trace.table(Steps)
    complete = set(steps.step[steps.is_complete & (steps.kind == "recorded")].tolist())
    return tuple(number for number in trace.recorded_steps if number in complete)
