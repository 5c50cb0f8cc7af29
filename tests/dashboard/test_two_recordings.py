"""Two recordings: one laid over the other, what changed between them as boxes, and runs that appear beside one."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("dash")

from memprof.analysis.diff.summary import PEAK
from memprof.analysis.plans.predict import forecast, predicted_trace
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_tables import plan_to_tables
from memprof.trace.manifest import Manifest
from memprof.trace.store import Trace, write_trace
from memprof_dashboard.figures.bars import GREW, SHRANK
from memprof_dashboard.figures.boxes import changed
from memprof_dashboard.figures.shared import draw
from memprof_dashboard.header import _newest
from memprof_dashboard.palette import THEMES
from memprof_dashboard.rank import Rank
from memprof_dashboard.sources import Workspace, open_sources
from memprof_dashboard.state import View
from memprof_dashboard.summary_bar import legend
from memprof_dashboard.views import timelines
from memprof_dashboard.views.changes import changed_boxes, moment_of
from memprof_dashboard.views.timelines import _align, _anchors
from tests.browsing import as_plotly, text_of
from tests.building import Module, Op, Storage, make_tables, make_trace

main_timeline, other_timeline = as_plotly(timelines.main_timeline), as_plotly(timelines.other_timeline)
SAMPLES = Path(__file__).parents[2] / "sample_traces"
GPT = SAMPLES / "gpt" / "run.memprof"


def _rank(sizes: dict[str, int], line: int = 7) -> Rank:
    """A forward of one operator for each module, which makes that many bytes; then a backward that frees nothing."""
    ops = [
        Op("aten.mm.default", makes=[name], module=name, stack=f"/job/train.py:{line + place}:forward")
        for place, name in enumerate(sizes)
    ]
    storages = [Storage(name, size, module=name) for name, size in sizes.items()]
    modules = [Module("", "Net"), *(Module(name) for name in sizes)]
    return Rank(make_trace([[*ops, Op("aten.mm.default", "backward")]], storages, modules))


@pytest.mark.parametrize("by", ["module", "line", "stack"])
def test_boxes_are_as_large_as_what_changed(by: str) -> None:
    """What grew and what shrank do not cancel out, what is the same has no box, and totals are those of the moments."""
    base, head = _rank({"a": 10, "b": 20, "c": 5}), _rank({"a": 40, "b": 8, "c": 5})
    root, *boxes = changed_boxes(base, head, PEAK, by)
    assert (root.base, root.head, root.size) == (35, 53, 42)
    inside = [sum(box.size for box in boxes if box.parent == place) for place in range(len(boxes) + 1)]
    assert all(inner in (0, box.size) for box, inner in zip([root, *boxes], inside, strict=True))
    assert {(box.base, box.head) for box in boxes if not inside[boxes.index(box) + 1]} == {(10, 40), (20, 8)}


def test_lines_that_an_edit_moved_are_the_same_lines() -> None:
    """Three lines more above them: nothing changed."""
    base, head = _rank({"a": 10, "b": 20}), _rank({"a": 10, "b": 20}, line=10)
    for by in ("line", "stack"):
        assert [box.size for box in changed_boxes(base, head, PEAK, by)] == [0]


def test_colours_say_the_direction() -> None:
    """A box of which most grew, and one of which most shrank; without a change there is a sentence."""
    base, head = _rank({"a": 10, "b": 20, "c": 5}), _rank({"a": 40, "b": 8, "c": 5})
    boxes = changed_boxes(base, head, PEAK, "module")
    (trace,) = changed(boxes, THEMES["light"], is_flame=True).data
    colours = {box.label: colour for box, colour in zip(boxes, trace.marker.colors, strict=True)}
    assert (colours["a"], colours["b"]) == (GREW, SHRANK)
    assert changed(changed_boxes(base, base, PEAK, "module"), THEMES["light"], is_flame=False).data == ()


def test_moments_are_the_peaks_of_phases() -> None:
    """Forward's is the operator that has made all; of a phase that is not there, it is the peak."""
    rank = _rank({"a": 10, "b": 20})
    assert [moment_of(rank, name) for name in ("forward", "backward", PEAK, "optimizer")] == [1, 2, 1, 1]


def test_a_recording_laid_over_itself_is_itself() -> None:
    """Every boundary of a step and a phase lies on itself; the line peaks where the areas do."""
    workspace = Workspace(open_sources([GPT, SAMPLES / "lstm" / "run.memprof"]))
    rank = workspace.rank(0, -1)
    own, others = _anchors(rank, rank, 0, rank.history.ops)
    assert own.tolist() == others.tolist()
    own, others = _anchors(rank, workspace.rank(1, -1), 0, rank.history.ops)
    assert (np.diff(own) >= 0).all()
    assert (np.diff(others) >= 0).all()
    first, end = rank.step_range(4)
    view = View(other=0, lay="over", first=first, end=end)
    name = workspace.source(0).name
    (line,) = (one for one in main_timeline(workspace, view, -1, "light").data if one.name == name)
    peak = rank.history.peak(first, end)
    assert float(line.x[int(np.argmax(line.y))]) == pytest.approx(peak, abs=2)


def test_two_recordings_have_one_axis_of_time() -> None:
    """Below each other, both show the same range, and the steps and phases of the second stand under the first's."""
    sources = [GPT, SAMPLES / "lstm" / "run.memprof", GPT]
    workspace = Workspace(open_sources(sources))
    first, end = workspace.rank(0, -1).step_range(4)
    upper = main_timeline(workspace, View(other=2, first=first, end=end), -1, "light")
    for other in (1, 2):
        lower = other_timeline(workspace, View(other=other, first=first, end=end), -1, "light")
        assert tuple(lower.layout.xaxis.range) == tuple(upper.layout.xaxis.range) == (first, end)
        places = [np.asarray(trace.x) for trace in lower.data]
        assert all((first <= x).all() and (x <= end).all() and (np.diff(x) >= 0).all() for x in places)
    bands = [next(trace for trace in figure.data if trace.type == "bar") for figure in (upper, lower)]
    above, below = [list(zip(band.customdata, band.x.tolist(), strict=True)) for band in bands]
    for phase, at in above:  # its columns hold up to two operators
        assert any(phase == name and abs(at - place) <= 2 for name, place in below)


def test_two_recordings_have_one_cursor_and_one_scale() -> None:
    """The cursor stands at the same place in both timelines, and equal bytes are equally high, with the budget too."""
    workspace = Workspace(open_sources([GPT, SAMPLES / "lstm" / "run.memprof"]))
    first, end = workspace.rank(0, -1).step_range(4)
    for view in (View(other=1, first=first, end=end), View(other=1, first=first, end=end, budget="200%")):
        upper, lower = (one(workspace, view, first + 7, "light") for one in (main_timeline, other_timeline))
        assert (
            upper.layout.shapes[0]
            == lower.layout.shapes[0]
            != main_timeline(workspace, view, -1, "light").layout.shapes[0]
        )
        assert tuple(upper.layout.yaxis.range) == tuple(lower.layout.yaxis.range)
        assert len(upper.layout.shapes) == len(lower.layout.shapes) == (2 if view.budget else 1)


def test_legend_has_the_phases_of_both_recordings() -> None:
    """What one recomputes is in the legend though the other recomputes nothing."""
    plain = [Op("aten.mm.default", makes=["a"]), Op("aten.mm.default", "backward", frees=["a"])]
    again = [plain[0], replace(plain[1], is_recompute=True, frees=[]), plain[1]]
    storages = [Storage("a", 4096)]
    histories = [Rank(make_trace([ops], storages)).history for ops in (plain, again)]
    stretches = [(history, 0, history.ops) for history in histories]

    def names(count: int) -> list[str]:
        _, row = legend(stretches[:count], {}, has_phases=True)
        return [key.children[1].children for key in row.children[1:]]

    assert names(1) == ["forward", "backward"]
    assert names(2) == ["forward", "backward", "recomputed"]
    categories, _ = legend(stretches, {"activation": 4096}, has_phases=True)
    assert text_of(categories) == "activations4.00 KiB"


def test_the_second_recording_has_its_own_axis_next_to_an_empty_one(tmp_path: Path) -> None:
    """A first recording without operators has no axis to share."""
    write_trace(tmp_path / "empty.memprof", [(Manifest(target="train.py"), make_tables([[]], []))])
    workspace = Workspace(open_sources([tmp_path / "empty.memprof", GPT]))
    figure = other_timeline(workspace, View(other=1), -1, "light")
    assert tuple(figure.layout.xaxis.range) == (0, workspace.rank(1, -1).history.ops)


def test_a_short_phase_is_drawn_as_long_as_the_one_above() -> None:
    """An optimizer step of one small operator stands below one of 1,000, and is not hidden by its neighbour's peak."""
    storages = [Storage("w", 64), Storage("a", 4096)]
    backward = [Op("aten.mm.default", "backward") for _ in range(2000)]
    before, after = (
        [Op("aten.mm.default", makes=["w", "a"]), *backward],
        Op("aten.add.default", "optimizer", frees=["a"]),
    )
    ranks = [
        Rank(make_trace([[*before, *(after, *[Op("aten.mul.default", "optimizer")] * count)]], storages))
        for count in (999, 0)
    ]
    aligned = _align(*ranks, 0, 3001)
    drawn = draw(ranks[1].history.total, aligned.first, aligned.end, cuts=aligned.cuts)
    assert aligned.place(drawn.left)[-1] == 2001
    assert drawn.op_ids[-1] == 2001


def write_run_under_plan(path: Path) -> None:
    """Writes a recording as a run under a plan leaves it: here the predicted step, called a recorded one."""
    trace = Trace.open(GPT)
    made = forecast(trace, Plan((Checkpoint(("layers.*",)),)))
    manifest, tables = predicted_trace(made)
    manifest = replace(manifest, plan=plan_to_tables(made.plan), backend=trace.manifest.backend)
    write_trace(path, [(manifest, tables)])


def test_runs_of_a_plan_that_appear_are_opened(tmp_path: Path) -> None:
    """A run under a plan that is written next to an open recording is opened, once; other files are left alone."""
    own = Path(shutil.copy(GPT, tmp_path / "run.memprof"))
    workspace = Workspace(open_sources([own]))
    assert workspace.open_new_runs() == ()
    shutil.copy(GPT, tmp_path / "same-without-a-plan.memprof")
    (tmp_path / "damaged.memprof").write_bytes(b"no recording")
    (tmp_path / "notes.txt").write_text("none either")
    assert workspace.open_new_runs() == ()
    write_run_under_plan(tmp_path / "fits.memprof")
    (opened,) = workspace.open_new_runs()
    assert (opened.name, len(workspace.sources)) == ("fits.memprof", 2)
    assert workspace.open_new_runs() == ()
    place, sentence = _newest(workspace, View(), 1)
    assert place == 1
    assert sentence.startswith("New run fits.memprof: predicted peak 37.69 MiB, measured 37.69 MiB: exact")


def test_a_job_opens_at_its_worst_rank(tmp_path: Path) -> None:
    """Of ranks with different peaks the highest is shown first; a rank that is named is that one."""
    ranks = []
    for number, size in enumerate((10, 30, 20)):
        tables = make_tables([[Op(makes=["a"])]], [Storage("a", size)])
        ranks.append((Manifest(target="train.py", rank=number, world_size=3), tables))
    write_trace(tmp_path / "ranks.memprof", ranks)
    workspace = Workspace(open_sources([tmp_path / "ranks.memprof"]))
    assert workspace.rank(0, -1).trace.rank == 1
    assert workspace.rank(0, 2).trace.rank == 2
