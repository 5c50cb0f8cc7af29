"""The pages of compared allocations and of leaks: axes, marks, names as text, holders."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
from plotly.utils import PlotlyJSONEncoder

from memprof.analysis.compared.comparison import Gap, common_positions, compare_sequences
from memprof_dashboard.figures.allocations import Aligned, allocations
from memprof_dashboard.figures.bars import growth_bars
from memprof_dashboard.figures.shared import COLUMNS
from memprof_dashboard.pages.allocations import AllocationsPage, _range, _sides
from memprof_dashboard.pages.leaks import _recording, _series
from memprof_dashboard.palette import THEMES
from memprof_dashboard.rank import Rank
from memprof_dashboard.sources import Workspace, open_sources
from memprof_dashboard.state import View
from tests.analysis.test_compared_allocations import _KIB, _STEP, snapshot
from tests.browsing import text_of
from tests.building import Op, Storage, make_trace
from tests.recorder.recorded import record

pytest.importorskip("dash")


#: Beside _STEP: relu's allocation is missing, the second mm's is larger, and a clone's is extra.
_OTHER = [("mm", 64 * _KIB), ("mm", 20 * _KIB), ("_softmax", 8 * _KIB), ("clone", 4 * _KIB)]


_HOSTILE = "<img src=x onerror=alert(1)>"


def _workspace(folder: Path, other: list[tuple[str, int]] = _OTHER, file: str = "train.py") -> Workspace:
    paths = [folder / "gpu.pickle", folder / "dry.pickle"]
    for path, sizes in zip(paths, (_STEP, other), strict=True):
        snapshot(path, sizes, file=file)
    return Workspace(open_sources(paths))


def _aligned(workspace: Workspace) -> Aligned:
    return Aligned(compare_sequences(*(source.sequence(-1) for source in workspace.sources)))


def test_equal_allocations_share_a_position() -> None:
    """A gap takes as many positions as its longer side has allocations; what follows is together again."""
    real, dry, length = common_positions([Gap(1, 2, 1, 4), Gap(3, 5, 5, 5)], 6, 6)
    assert real.tolist() == [0, 1, 4, 5, 6, 7]
    assert dry.tolist() == [0, 1, 2, 3, 4, 7]
    assert length == 8
    assert common_positions([], 0, 0)[2] == 0
    assert common_positions([Gap(0, 2, 0, 0)], 2, 0)[2] == 2


def test_both_lines_their_difference_and_marks(tmp_path: Path) -> None:
    """Live bytes by hand: each allocation is freed after the next one. Hovering names bytes, operator and line."""
    figure = allocations(_aligned(_workspace(tmp_path)), 0, 5, THEMES["light"])
    real, dry, gained, *marks = figure.data
    assert figure.layout.yaxis.title.text == "KiB"
    # Positions: mm, relu | mm of 20, mm of 16, _softmax, clone. The mm of 16 KiB shares none with that of 20 KiB.
    assert np.asarray(real.y).tolist() == [64, 96, 48, 24, 24]
    assert np.asarray(dry.y).tolist() == [64, 84, 84, 28, 12]
    assert np.asarray(gained.y).tolist() == [0, -12, 36, 4, -12]
    assert real.text[1] == "32.00 KiB by relu in train.py:7"
    assert gained.text[:2] == ("equal", "-12.00 KiB")
    found = {mark.name: (list(mark.x), list(mark.text)) for mark in marks}
    assert found == {
        "missing in the dry run": ([1], ["32.00 KiB by relu in train.py:7"]),
        "extra in the dry run": ([4], ["4.00 KiB by clone in train.py:7"]),
        "of another size": ([2], ["16.00 KiB by mm in train.py:7; 20.00 KiB in the dry run"]),
    }
    assert [(band.x0, band.x1) for band in figure.layout.shapes] == [(0.5, 2.5), (3.5, 4.5)]


def test_long_sequences_keep_their_peak_and_count_marks(tmp_path: Path) -> None:
    """A pixel shows the peak of its allocations, and one mark for all differences of a kind in it."""
    steps = _STEP * 900
    for name, sizes in (("gpu.pickle", steps), ("dry.pickle", [one for one in steps if one[0] != "relu"])):
        snapshot(tmp_path / name, sizes)
    aligned = _aligned(Workspace(open_sources([tmp_path / "gpu.pickle", tmp_path / "dry.pickle"])))
    figure = allocations(aligned, 0, aligned.length, THEMES["dark"])
    assert len(figure.data[0].x) == COLUMNS
    assert max(figure.data[0].y) == 96
    assert "max of 5" in figure.layout.xaxis.title.text
    marks = [int(text.partition(", and ")[2].partition(" ")[0] or 0) + 1 for text in figure.data[3].text]
    assert sum(marks) == 900


def test_hostile_names_are_text(tmp_path: Path) -> None:
    """Markup in the name of a file or an operator is shown, not obeyed."""
    real, dry = (source.sequence(-1) for source in _workspace(tmp_path, file=_HOSTILE).sources)
    dry = dataclasses.replace(dry, operators=["<b>", *dry.operators[1:]])
    figure = allocations(Aligned(compare_sequences(real, dry)), 0, 5, THEMES["light"])
    assert figure.data[1].text[0] == "64.00 KiB by &lt;b&gt; in &lt;img src=x onerror=alert(1)&gt;:7"
    assert "<" not in "".join(text for line in figure.data for text in line.text)


def test_layout_has_verdict_and_tables(tmp_path: Path) -> None:
    """The verdict of the command line, a row for each kind of difference, both sides; equality is said."""
    page = AllocationsPage().layout(_workspace(tmp_path), View(tab="allocations", other=1))
    shown = json.dumps(page, cls=PlotlyJSONEncoder, ensure_ascii=False)
    assert "2 of 4 allocations equal, peak \N{MINUS SIGN}12.500 % (\N{MINUS SIGN}12,288 B)" in text_of(page)
    assert all(word in shown for word in ("missing", "extra", "another size", "relu", "clone", "train.py:7"))
    assert "live at the beginning" in shown
    equal = AllocationsPage().layout(_workspace(tmp_path, _STEP), View(other=1))
    assert "Every allocation is equal" in json.dumps(equal, cls=PlotlyJSONEncoder)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    """One recording, or no second one chosen: what to do."""
    workspace = _workspace(tmp_path)
    alone = AllocationsPage().layout(Workspace(workspace.sources[:1]), View())
    assert "memprof diff --dashboard" in json.dumps(alone, cls=PlotlyJSONEncoder)
    assert "compare with" in json.dumps(AllocationsPage().layout(workspace, View()), cls=PlotlyJSONEncoder)


def test_a_dry_run_is_the_dry_run_wherever_it_was_opened(tmp_path: Path) -> None:
    """A recording whose backend is a dry run stands for the dry run; a file that changes is read again."""
    (tmp_path / "train.py").write_text(
        "import torch\nmodel = torch.nn.Linear(8, 8)\n"
        "for _ in range(3):\n    model(torch.randn(2, 8)).sum().backward()\n"
    )
    assert record(tmp_path, "--dry-run", "-o", "dry.memprof", "train.py").returncode == 0
    snapshot(tmp_path / "gpu.pickle", _STEP)
    workspace = Workspace(open_sources([tmp_path / "dry.memprof", tmp_path / "gpu.pickle"]))
    assert [source.name for source in _sides(workspace, View(other=1))] == ["gpu.pickle", "dry.memprof"]
    dry, gpu = workspace.sources
    assert (dry.is_snapshot, gpu.is_snapshot) == (False, True)
    before = gpu.sequence(-1)
    assert gpu.sequence(-1) is before
    snapshot(tmp_path / "gpu.pickle", _STEP * 2)
    os.utime(tmp_path / "gpu.pickle", (1, 1))
    assert gpu.refresh()
    assert len(gpu.sequence(-1)) == 2 * len(before)


@pytest.mark.parametrize(
    ("relayout", "expected"),
    [
        (None, (0, 100)),
        ({"autosize": True}, (0, 100)),
        ({"xaxis.range[0]": 19.5, "xaxis.range[1]": 40.2}, (20, 41)),
        ({"xaxis.range[0]": -5, "xaxis.range[1]": 1e9}, (0, 100)),
        ({"xaxis.range[0]": 98.9, "xaxis.range[1]": 99}, (92, 100)),
        ({"xaxis.range[0]": "x", "xaxis.range[1]": 9}, (0, 100)),
        ({"xaxis.range[0]": float("nan"), "xaxis.range[1]": 9}, (0, 100)),
    ],
)
def test_zoom(relayout: object, expected: tuple[int, int]) -> None:
    """What the browser leaves in sight is drawn anew, at least eight positions; anything else is all of it."""
    assert _range(relayout, 100) == expected


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
