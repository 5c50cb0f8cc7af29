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


def test_better_and_worse_are_both_differences() -> None:
    """Lower is reported as better and higher as worse; rounding alone is not a difference."""
    before = {"status": "found", "peak_bytes": 1000, "extra_time": 0.5}
    assert differences(before, {**before, "extra_time": 0.25}, "sqrt") == ["extra_time was 0.5, is 0.25: better"]
    assert differences(before, {**before, "peak_bytes": 1001}, "sqrt") == ["peak_bytes was 1,000, is 1,001: worse"]
    assert differences(before, {**before, "extra_time": 0.5 + 1e-13}, "sqrt") == []
    assert differences(before, {**before, "peak_bytes": 1001}, "checkmate") == []
    assert differences(before, {"status": "infeasible", "least_bytes": 5}, "sqrt") == [
        "extra_time was 0.5, is None",
        "least_bytes was None, is 5",
        "peak_bytes was 1000, is None",
        "status was found, is infeasible",
    ]
