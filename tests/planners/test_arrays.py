"""Steps built from arrays."""

from __future__ import annotations

import pytest

from memprof.errors import UsageError
from memprof.planners.graph.arrays import step_from_arrays
from memprof.planners.graph.graph import graph_of
from memprof.replay.live import live_bytes


def test_a_step_of_four_operators_by_hand() -> None:
    """Outputs live to their last reader, fixed bytes throughout, workspace while its operator runs."""
    step = step_from_arrays(
        time_us=[1.0, 2.0, 3.0, 4.0],
        output_bytes=[100, 50, 20, 10],
        inputs=[[], [0], [1], [0, 2]],
        is_backward=[False, False, True, True],
        workspace_bytes=[0, 7, 0, 0],
        fixed_bytes=1000,
    )
    assert live_bytes(step).during.tolist() == [1100, 1157, 1170, 1130]
    assert step.duration_us == 10.0
    graph = graph_of(step)
    assert graph.can_repeat.tolist() == [True, True, False, False]
    assert graph.is_saved().tolist() == [True, True]


def test_views_have_no_bytes_of_their_own() -> None:
    """A view keeps what it looks at alive; who reads it reads that."""
    step = step_from_arrays(
        time_us=[1.0] * 4,
        output_bytes=[100, 999, 10, 10],
        inputs=[[], [0], [1], [1, 2]],
        is_backward=[False, False, False, True],
        view_of=[-1, 0, -1, -1],
    )
    assert live_bytes(step).during.tolist() == [100, 100, 110, 120]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"output_bytes": [1]}, "output_bytes has 1 entries"),
        ({"inputs": [[], [1]]}, "operator 1 reads the output of operator 1"),
        ({"time_us": [1.0, float("nan")]}, "must not be negative"),
        ({"fixed_bytes": -1}, "must not be negative"),
        ({"in_place": [-1, 0], "view_of": [-1, 0]}, "is both a view and in place"),
    ],
)
def test_arrays_that_make_no_step_are_refused(changes: dict[str, object], sentence: str) -> None:
    """One sentence says which entry is wrong."""
    arrays: dict[str, object] = {
        "time_us": [1.0, 2.0],
        "output_bytes": [10, 20],
        "inputs": [[], [0]],
        "is_backward": [False, True],
    }
    with pytest.raises(UsageError, match=sentence):
        step_from_arrays(**{**arrays, **changes})  # type: ignore[arg-type]
