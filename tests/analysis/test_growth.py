"""Growth is a rise over a window that goes on: in every step, or in steps at a rhythm that the window shows."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from pathlib import Path

import pytest

from memprof.analysis.leaks.growth import describe_growth, growth_of_run, rhythm
from memprof.analysis.leaks.leak import describe_leak
from memprof.analysis.leaks.leaks import LeakReport, find_leaks
from memprof.cli.main import main
from memprof.trace.manifest import Manifest
from memprof.trace.schema import StepPeaks
from memprof.trace.store import Trace, write_trace
from tests.building import Op, Storage, make_tables, make_trace

KEPT = 262_144


def grown(steps: int, adds: set[int], clears: Set[int] = frozenset(), batch: int = 0) -> LeakReport:
    """Returns what grows in steps that make a tensor at one line, kept in ``adds``, and all freed in ``clears``."""
    return find_leaks(_trace(steps, adds, clears, batch))


def _trace(steps: int, adds: set[int], clears: Set[int] = frozenset(), batch: int = 0) -> Trace:
    return make_trace(*_job(steps, adds, clears, batch))


def _job(
    steps: int, adds: set[int], clears: Set[int] = frozenset(), batch: int = 0
) -> tuple[list[list[Op]], list[Storage]]:
    ops: list[list[Op]] = []
    held: list[str] = []
    storages: list[Storage] = []
    for step in range(steps):
        freed = [*([f"out{step - 1}"] if step and step - 1 not in adds else [])]
        if step in clears:
            freed, held = [*freed, *held], []
        held += [f"out{step}"] if step in adds else []
        storages.append(Storage(f"out{step}", KEPT + batch * step, shape="512x128"))
        ops.append([Op("aten.addmm.default", makes=[f"out{step}"], frees=freed, stack="/job/train.py:7:main")])
    return ops, storages


@pytest.mark.parametrize(
    ("births", "steps", "every"),
    [
        ([0, 1], 3, 1),  # each step adds something: the default window of three steps is enough
        ([0], 3, None),  # one of two: every second step, or once
        ([0, 2], 4, None),  # a distance, of which three steps are needed
        ([0, 2, 4], 6, 2),
        ([0, 2, 4, 6], 8, 2),
        ([0, 6, 12], 14, 6),  # once an epoch of six steps
        ([4], 9, None),
        ([], 9, 0),
        ([0, 1], 9, 0),  # a cache that filled in the first third
        ([0, 1, 2, 3], 12, 0),  # one that has been full for long
        ([5, 6, 7], 9, 1),  # a leak that begins later
        ([0, 1, 3, 4, 6, 7, 9], 11, 2),  # at no fixed distance, but never fewer
        ([0, 1, 2, 6], 11, None),
    ],
)
def test_the_rhythm_of_what_stays(births: list[int], steps: int, every: int | None) -> None:
    """What is added in the steps of a window and stays goes on, has ended, or is too seldom to know."""
    assert rhythm(births, steps) == every


def test_a_list_that_grows_in_every_second_step() -> None:
    """262,144 B every second step are 131,072 B a step, at the line that makes them."""
    report = grown(8, {0, 2, 4, 6})
    assert report.growth.bytes_per_step == KEPT // 2
    (leak,) = report.leaks
    assert (leak.every_steps, leak.line, leak.kept_bytes) == (2, "train.py:7", 4 * KEPT)
    assert describe_leak(leak).startswith("256.00 KiB every 2 steps; kept since step 0")


def test_steps_too_few_for_the_rhythm_are_undecided() -> None:
    """The sentence says what stays, where it is made, and what to run."""
    report = grown(3, {0})
    assert report.growth.bytes_per_step is None
    assert report.growth.is_rise
    assert describe_growth(report.growth).startswith(
        "Cannot determine whether memory grows: 256.00 KiB of steps 0 to 2 stay, made at train.py:7, "
    )
    assert "`memprof record --steps 12`" in report.growth.why_unknown
    assert "`memprof record --light`" in report.growth.why_unknown


@pytest.mark.parametrize(
    ("adds", "clears", "batch"),
    [
        (set(range(12)), {3, 6, 9}, 0),  # a list that is cleared
        (set(range(12)), {5, 10}, 0),
        (set(), set(), 4096),  # batches that grow
        ({0, 1, 2}, set(), 0),  # a cache that fills up
        ({0}, set(), 0),  # what the first update sets up
    ],
    ids=["every-3", "every-5", "batches", "cache", "once"],
)
def test_what_is_no_growth(adds: set[int], clears: set[int], batch: int) -> None:
    """Lists that are cleared, growing batches and what is set up once end no gate."""
    assert grown(12, adds, clears, batch).growth.bytes_per_step == 0


def test_a_gate_is_not_passed_by_steps_that_are_too_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`diff` ends with 3 where growth is undecided, with 4 where there is some, and with 0 where not."""
    paths = []
    for name, adds in (("undecided", {0}), ("grows", {0, 2, 4}), ("flat", set[int]())):
        steps = 3 if name == "undecided" else 6
        paths.append(str(tmp_path / f"{name}.memprof"))
        write_trace(paths[-1], [(Manifest(target="train.py"), make_tables(*_job(steps, adds)))])
    statuses = [main(["diff", path, "--fail-on", "growth>0"]) for path in paths]
    page = capsys.readouterr().out
    assert statuses == [3, 4, 0]
    assert "growth is undecided, these steps are too few: record more of them (`memprof record --steps 12`)" in page
    assert main(["diff", paths[2], paths[0], "--fail-on", "growth>0"]) == 3
    assert main(["diff", paths[0], paths[2], "--fail-on", "growth>0"]) == 0


def test_the_history_of_lbfgs_is_undecided(tmp_path: Path) -> None:
    """Its updates stay until ``history_size`` of them are there; another optimizer's state that stays is growth."""
    ops, storages = _job(6, set(range(6)))
    tables = make_tables(ops, [replace(one, category="optimizer_state") for one in storages])
    statuses = []
    for described in ("LBFGS closure lbfgs", "Adam foreach fused"):
        path = str(tmp_path / f"{described[:4]}.memprof")
        write_trace(path, [(Manifest(target="train.py", optimizers=(described,)), tables)])
        statuses.append(main(["diff", path, "--fail-on", "growth>0"]))
    assert statuses == [3, 4]


def test_a_run_measured_in_two_ways_says_how_many_steps_are_alike() -> None:
    """Six of the twelve peaks can be compared, too few: "has 12 steps; growth shows from 8 on" would be no reason."""
    hows = ["heard", "counted"] * 6
    found = growth_of_run(StepPeaks.of(step=range(12), allocated_bytes=[1000] * 12, how=hows))
    assert found is not None
    assert found.why_unknown == "the run has 12 steps, 6 of them measured alike; growth shows from 8 on."


@pytest.mark.parametrize(
    ("sizes", "growth"),
    [
        ([1000 + 100 * (step // 2) for step in range(12)], 50),  # every second step
        ([1000 + 600 * (step // 100) for step in range(500)], 6),  # once in a hundred: longer than a sixth of the run
        ([1000 + 600 * (step > 400) for step in range(500)], None),
        ([1000 + 600 * (step > 140) for step in range(500)], 0),
    ],
    ids=["every-2", "epochs", "once-late", "once-early"],
)
def test_the_rhythm_of_a_run(sizes: list[int], growth: int | None) -> None:
    """The floor of a whole run need not rise in each of its parts; a single late rise is undecided."""
    found = growth_of_run(StepPeaks.of(step=range(len(sizes)), allocated_bytes=sizes, how=["counted"] * len(sizes)))
    assert found is not None
    assert found.bytes_per_step == growth
