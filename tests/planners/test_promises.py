"""Every planner of the registry satisfies the invariants, as must planners added to it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import memprof
from memprof.cli.main import main
from memprof.planners import base
from memprof.planners.base import Planner, ScheduleRequest, ScheduleResult, planner_types
from memprof.planners.graph.choices import Choices
from memprof.planners.graph.schedule import replay
from memprof.planners.graph.writing import Demand
from tests.planners import graphs
from tests.planners.golden import SOLVED
from tests.planners.promises import SMALL, check_answers, check_planner, step_named

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "gpt" / "run.memprof"


class EveryNth(Planner):
    """Keeps every n-th of the values that backward needs."""

    name: ClassVar[str] = "every_nth"
    source: ClassVar[str] = "an example, not a paper"
    summary: ClassVar[str] = "keeps every n-th saved value"

    def search(self, task: ScheduleRequest) -> ScheduleResult:
        choices = Choices(task)
        if choices.is_met:
            return choices.met()
        saved = np.flatnonzero(task.graph.is_saved())
        for n in range(1, 20):
            dropped = np.zeros(task.graph.values, dtype=bool)
            dropped[np.delete(saved, np.s_[::n])] = True
            choices.add(replay(task.graph, Demand(task.graph).schedule(dropped)), f"keeps every {n}-th saved value")
        return choices.found()


@pytest.mark.parametrize("step", SMALL)
@pytest.mark.parametrize("kind", planner_types(), ids=lambda kind: kind.name)
def test_every_planner_keeps_its_promises(kind: type[Planner], step: str) -> None:
    """Within the budget by the replay, monotone in it, and nothing called infeasible that is not."""
    check_planner(kind, step)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), operators=st.integers(1, 20), link=st.sampled_from([0.0, 5.0, 2000.0]))
@example(seed=2930, operators=16, link=0.0)  # DTR named a budget in which it then evicted too little
def test_quick_planners_keep_them_on_any_graph(seed: int, operators: int, link: float) -> None:
    """So do all but those that solve a program, whatever the graph."""
    for kind in planner_types():
        if kind.name not in SOLVED:
            check_answers(kind(), graphs.random_graph(operators, seed), (1.0, 0.8, 0.65, 0.45), link=link)


def test_a_planner_is_added_by_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is among those that are held to the promises, found by its name, offered, compared and explained."""
    monkeypatch.setattr(base, "PLANNERS", [*base.PLANNERS, f"{__name__}:EveryNth"])
    kind = planner_types()[-1]
    assert kind.name == "every_nth"
    for step in SMALL:
        check_planner(kind, step)
    found = memprof.find_plan(step_named("gpt"), 60 << 20, planner="every_nth")
    assert found.runs is not None
    assert found.schedule_peak_bytes <= 60 << 20
    words = ["suggest", str(SAMPLE), "--budget", "60MiB", "--allow", "checkpoint", "--planner"]
    assert main([*words, "every_nth"]) in (0, 4)
    assert "every_nth, recomputing single operators: peak " in capsys.readouterr().out
    assert main([*words, "every_mth"]) == 2
    assert "did you mean 'every_nth'?" in capsys.readouterr().err


def test_an_entry_that_is_no_planner_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong line of the registry fails where it is read."""
    monkeypatch.setattr(base, "PLANNERS", ["memprof.planners.base:ScheduleRequest"])
    with pytest.raises(AssertionError, match="base:ScheduleRequest is not a planner"):
        planner_types()
