"""Planners reach their stored results: improvements must be stored deliberately, too."""

from __future__ import annotations

import json

import pytest

from memprof.planners.base import planner_types
from tests.planners.golden import PATH, UPDATE, cases, differences, graph_named, reached
from tests.planners.promises import peak_bytes

GOLDEN = json.loads(PATH.read_text())


@pytest.mark.parametrize(("step", "planner"), cases())
def test_results_are_as_before(step: str, planner: str) -> None:
    """Status, peak, extra time and least budget are those of golden.json."""
    known, found = GOLDEN[f"{step}, {planner}"], reached(step, planner)
    changed = [
        f"{step}, {planner} at {share} of the peak: {line}"
        for share, figures in found.items()
        for line in differences(known[share], figures, planner)
    ]
    assert known.keys() == found.keys()
    peak = peak_bytes(graph_named(step))
    assert all(figures.get("peak_bytes", 0) <= peak * float(share[:-1]) / 100 for share, figures in found.items())
    assert not changed, "\n".join([*changed, f"If this is meant, update golden.json with `{UPDATE}` and commit it."])


def test_every_planner_is_held_to_results() -> None:
    """The file has the cases of every planner, and no others; each planner has a schedule for some budget."""
    assert set(GOLDEN) == {f"{step}, {planner}" for step, planner in cases()}
    with_schedule = {
        name.partition(", ")[2] for name, answers in GOLDEN.items() for one in answers.values() if "extra_time" in one
    }
    assert with_schedule == {kind.name for kind in planner_types()}
