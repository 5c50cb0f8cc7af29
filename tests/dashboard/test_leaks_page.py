"""The page of leaks: what grows, since when, what holds it, and the way to its tensors."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("dash")

from plotly.utils import PlotlyJSONEncoder

from memprof_dashboard.figures.bars import growth_bars
from memprof_dashboard.pages.leaks import _recording, _series
from memprof_dashboard.palette import THEMES
from memprof_dashboard.rank import Rank
from tests.building import Op, Storage, make_trace

MIB = 1 << 20
LIGHT = THEMES["light"]


def _rank(steps: int, kept: int = 2 * MIB) -> Rank:
    """Each step makes a tensor that stays, of ``kept`` bytes, and one that does not."""
    ops = [
        [
            Op("aten.mm.default", makes=[f"kept{step}"], stack="/job/train.py:7:main") if kept else Op(),
            Op(makes=[f"gone{step}"]),
            Op(frees=[f"gone{step}"]),
        ]
        for step in range(steps)
    ]
    storages = [Storage(f"kept{step}", kept, shape="512x1024") for step in range(steps) if kept]
    return Rank(make_trace(ops, [*storages, *(Storage(f"gone{step}", MIB) for step in range(steps))]))


def _text(part: object) -> str:
    return json.dumps(part, cls=PlotlyJSONEncoder, ensure_ascii=False)


def test_what_grows_is_named_with_a_way_to_it() -> None:
    """The rate, the steps, the line, and a button that finds its tensors at the end of the last step."""
    text = _text(_recording(_rank(4), LIGHT))
    sentence = "Memory grows by 2.00 MiB a step (steps 0 to 3): made at"
    assert text.index(sentence) < text.index("In use at the end of each step")  # the leak leads
    assert "512x1024 float32" in text
    assert "train.py:7" in text
    assert r"\\\"at\\\": 11" in text  # the last of 4 x 3 operators


def test_what_does_not_grow_says_so() -> None:
    """No table, and what a leak would look like; with too few steps, how to record more."""
    text = _text(_recording(_rank(4, kept=0), LIGHT))
    assert "Memory does not grow from step to step" in text
    assert "made at" not in text
    assert "Record more steps" in _text(_recording(_rank(2), LIGHT))


def test_open_recordings_are_a_series() -> None:
    """What is in use at the end of each is compared in their order."""
    ranks = tuple(_rank(1, kept=size * MIB) for size in (1, 2, 4))
    text = _text(_series(ranks, LIGHT))
    assert "grows from each open recording to the next" in text
    assert "+3.00 MiB" in text
    assert "does not grow" in _text(_series(ranks[::-1], LIGHT))


def test_bars_of_one_name_stand_side_by_side() -> None:
    """Two recordings may have the same file name."""
    (bars,) = growth_bars(["run", "run"], [MIB, 2 * MIB], LIGHT).data
    assert list(bars.x) == [0, 1]
    assert list(bars.y) == [1, 2]
    assert growth_bars([], [], LIGHT).data == ()
