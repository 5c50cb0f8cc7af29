"""The diff page: bars, two steps in one picture, and the text when there is nothing to compare."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("plotly")

from hypothesis import given
from plotly.utils import PlotlyJSONEncoder

from memprof.analysis.diff.comparison import Change, compare
from memprof.analysis.diff.diff_tables import headline
from memprof.analysis.diff.summary import summarise_step
from memprof.analysis.plans.predict import forecast, predicted_trace
from memprof.errors import InconclusiveError
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.replay.live import live_bytes
from memprof.trace.manifest import Manifest
from memprof.trace.store import Trace
from memprof_dashboard.figures.bars import change_bars
from memprof_dashboard.figures.overlay import Curve, overlay, shares
from memprof_dashboard.pages.diff import DiffPage, _parts
from memprof_dashboard.palette import THEMES
from memprof_dashboard.sources import Rank, Source, Workspace
from memprof_dashboard.state import View
from memprof_dashboard.views.changes import changes, shift, step_time
from tests.building import Op, Storage, make_step, make_trace
from tests.strategies import jobs

KIB = 1024
LIGHT = THEMES["light"]
SAMPLES = Path(__file__).parents[2] / "sample_traces"


def _curve(name: str, phases: str, total: list[int]) -> Curve:
    """A curve of operators whose phases are given by their first letters."""
    names = {"f": "forward", "b": "backward", "o": "optimizer"}
    return Curve(name, np.array(total, dtype=np.int64), np.array([names[letter] for letter in phases], dtype=object))


def _workspace(*names: str) -> Workspace:
    return Workspace([Source(Path(name), name, Trace.open(SAMPLES / name / "run.memprof")) for name in names])


def _text(component: object) -> str:
    return json.dumps(component, cls=PlotlyJSONEncoder, ensure_ascii=False)


def test_bars_point_the_way_of_the_change() -> None:
    """What grew stands to the right, what shrank to the left; the text is on the other side, where no bar is."""
    figure = change_bars(["activations", "gradients"], np.array([3 * KIB, -2 * KIB]), LIGHT)
    bars, texts = figure.data
    assert np.asarray(bars.x).tolist() == [3, -2]
    assert figure.layout.xaxis.title.text == "KiB"
    assert [text.strip() for text in texts.text] == ["+3.00 KiB", "-2.00 KiB"]
    assert texts.textposition == ("middle left", "middle right")
    low, high = figure.layout.xaxis.range
    assert low < -2
    assert high > 3
    assert bars.marker.color[0] != bars.marker.color[1]
    assert bars.marker.pattern.shape[0] != bars.marker.pattern.shape[1]


@pytest.mark.parametrize(("gained", "sign"), [([5, 1], 1), ([-5, -1], -1)])
def test_bars_of_one_direction_leave_room_for_their_text(gained: list[int], sign: int) -> None:
    """On the other side of zero, more than a third of the figure."""
    figure = change_bars(["a", "b"], np.array(gained, dtype=np.int64), LIGHT)
    low, high = (sign * edge for edge in figure.layout.xaxis.range[::sign])
    assert high > 5
    assert -low > 0.5 * high


def test_no_change_is_said() -> None:
    """Bars without changes are a message, not an empty frame."""
    for gained in ([], [0, 0]):
        figure = change_bars(["x"] * len(gained), np.array(gained, dtype=np.int64), LIGHT)
        assert not figure.data
        assert figure.layout.annotations[0].text == "No change."


def test_hostile_names_are_text_on_bars() -> None:
    """Markup in a module's name is shown, not obeyed, on the axis and in the hover."""
    figure = change_bars(["<b>%{x}</b>"], np.array([1]), LIGHT)
    assert figure.layout.yaxis.ticktext[0] == "&lt;b&gt;%{x}&lt;/b&gt;"
    assert figure.data[0].hovertext[0] == "&lt;b&gt;%{x}&lt;/b&gt;"
    assert "<b>" not in figure.data[0].hovertemplate


def test_equal_phases_lie_on_each_other() -> None:
    """A backward twice as long is drawn over the base's backward: from the same place to the same place."""
    base, other = _curve("base", "ffbbo", [1] * 5), _curve("other", "ffbbbbo", [1] * 7)
    own, laid, is_aligned = shares(base, other)
    assert is_aligned
    assert own.tolist() == [0, 20, 40, 60, 80, 100]
    assert laid.tolist() == [0, 20, 40, 50, 60, 70, 80, 100]


def test_other_phases_stand_at_their_own_share() -> None:
    """If the phase sequences differ, each step is drawn over its own operators, and the axis says so."""
    base, other = _curve("base", "fb", [1, 2]), _curve("other", "fbfb", [1, 2, 1, 2])
    _, laid, is_aligned = shares(base, other)
    assert not is_aligned
    assert laid.tolist() == [0, 25, 50, 75, 100]
    figure = overlay(base, other, LIGHT)
    assert "phases differ" in figure.layout.xaxis.title.text
    assert [trace.type for trace in figure.data] == ["scatter", "scatter", "heatmap", "heatmap"]


def test_both_drawn_peaks_are_true_peaks() -> None:
    """Each line's highest point is its step's peak to the byte, and the marks say both."""
    step, other = (Trace.open(SAMPLES / name / "run.memprof").steady_step() for name in ("gpt", "lstm"))
    curves = [Curve(name, live_bytes(one).during, one.ops.phase) for name, one in (("a", step), ("b", other))]
    figure = overlay(curves[0], curves[1], LIGHT, budget_bytes=50 * KIB**2)
    assert figure.layout.yaxis.title.text == "MiB"
    for trace, curve in zip(figure.data[:2], curves, strict=True):
        assert float(np.asarray(trace.y).max()) * KIB**2 == curve.total.max()
        assert len(trace.x) == len(trace.y) <= 1_001
    assert figure.layout.shapes[0].y0 == 50
    texts = [annotation.text for annotation in figure.layout.annotations]
    assert texts[:3] == ["a: 88.92 MiB", "b: 19.65 MiB", "budget 50.00 MiB"]


def test_a_step_without_operators_is_said() -> None:
    """A step without operators gives a message."""
    figure = overlay(_curve("base", "", []), _curve("other", "f", [1]), LIGHT)
    assert not figure.data
    assert "without operators" in figure.layout.annotations[0].text


def test_one_recording_cannot_be_compared() -> None:
    """The page says how to open two, and how to choose the other."""
    assert "memprof dashboard base.memprof other.memprof" in _text(
        DiffPage().layout(_workspace("gpt"), View(tab="diff"))
    )
    assert "compare with" in _text(DiffPage().layout(_workspace("gpt", "lstm"), View(tab="diff")))


def test_a_recording_beside_itself_shows_zero() -> None:
    """The page of identical recordings says that nothing changed, and every change in it is 0 B."""
    page = _text(DiffPage().layout(_workspace("gpt", "gpt"), View(tab="diff", other=1)))
    assert "Nothing changed" in page
    assert "grew" not in page
    assert "shrank" not in page


def test_other_models_are_not_compared() -> None:
    """Two models have no common parts: the sentence names both instead of inventing a change."""
    with pytest.raises(InconclusiveError, match="GPT, the head of ResNet"):
        DiffPage().layout(_workspace("gpt", "resnet"), View(tab="diff", other=1))


def _job(activation: int, workspace: int, *, module: str = "body") -> Rank:
    """A weight of 1 KiB, an activation, and a backward that needs a workspace and makes a gradient of 1 KiB."""
    ops = [
        Op("aten.mm.default", module="head", makes=["y"], reads=["w"], stack="train.py:5:forward"),
        Op(
            "aten.mul.Tensor",
            "backward",
            module=module,
            makes=["g"],
            reads=["y"],
            frees=["y"],
            workspace=workspace,
            stack="train.py:9:loss",
        ),
    ]
    storages = [
        Storage("w", 1 * KIB, "parameter", module="head"),
        Storage("y", activation, "activation", module="head"),
        Storage("g", 1 * KIB, "gradient", module="head"),
    ]
    return Rank(make_trace([ops, []], storages, kinds=["recorded", "plain"]))


def test_phases_are_compared_with_themselves() -> None:
    """The peak moves from backward (1 + 8 + 1 + 4 KiB) to forward (1 + 16): each phase keeps to its own maximum."""
    found = changes(_job(8 * KIB, 4 * KIB), _job(16 * KIB, -2 * KIB))
    assert [(pair.name, pair.base_bytes, pair.head_bytes) for pair in (found.peak, *found.phases)] == [
        ("peak", 14 * KIB, 17 * KIB),
        ("forward", 9 * KIB, 17 * KIB),
        ("backward", 14 * KIB, 16 * KIB),
    ]
    assert shift(found.peak) == "In backward of body before, in forward of head now."
    assert shift(found.phases[0]) == "Still in forward of head (aten.mm.default)."
    assert headline(found) == "The peak grew by 3.00 KiB (+21.4 %) to 17.00 KiB, +8.00 KiB from train.py:5."
    assert step_time(found) == "1.0 ms in the base, 1.0 ms in the head (+0.0 %)"
    shrunk = changes(_job(16 * KIB, -2 * KIB), _job(8 * KIB, 4 * KIB))
    assert headline(shrunk) == "The peak shrank by 3.00 KiB (-17.6 %) to 14.00 KiB, -8.00 KiB from train.py:5."


def test_a_table_of_parts_sums_to_the_whole() -> None:
    """By hand: in backward the activation grew by 8 KiB, the workspace shrank by 6; the last row is the sum."""
    backward = changes(_job(8 * KIB, 4 * KIB), _job(16 * KIB, -2 * KIB)).phases[1]
    assert backward.parts["category"][:2] == (
        Change("activation", 8 * KIB, 16 * KIB),
        Change("workspace", 4 * KIB, -2 * KIB),
    )
    page = _text(_parts(backward))
    for text in ("+8.00 KiB", "-6.00 KiB", "+2.00 KiB", "14.00 KiB", "16.00 KiB"):
        assert text in page


def test_an_equal_peak_made_of_other_things_is_no_zero() -> None:
    """The same peak allocated in another module is distinguished from no change."""
    found = changes(_job(8 * KIB, 4 * KIB), _job(8 * KIB, 4 * KIB, module="elsewhere"))
    assert found.peak.bytes == 0
    assert headline(found).startswith("The peak is the same, 14.00 KiB; its composition")


@given(base=jobs(max_steps=1), head=jobs(max_steps=1))
def test_parts_sum_to_the_whole(
    base: tuple[list[list[Op]], list[Storage]], head: tuple[list[list[Op]], list[Storage]]
) -> None:
    """Whatever two jobs do: the parts of every moment, split any way, sum to what each side held there."""
    steps = [make_step(job[0][0], job[1]) for job in (base, head)]
    found = compare(*([summarise_step(step)] for step in steps))
    for pair in (found.peak, *found.phases):
        for parts in pair.parts.values():
            assert sum(part.base for part in parts) == pair.base_bytes
            assert sum(part.head for part in parts) == pair.head_bytes
    assert found.peak.base_bytes == live_bytes(steps[0]).during.max()
    assert found.peak.head_bytes == live_bytes(steps[1]).during.max()


def test_what_differs_and_why_is_named() -> None:
    """The same model under a plan: the page names the plan and that more runs again, in less than 150 kB."""
    recorded = Trace.open(SAMPLES / "gpt" / "run.memprof")
    manifest, tables = predicted_trace(forecast(recorded, Plan((Checkpoint(("layers.*",)),))))
    manifest = Manifest.from_json(json.loads(json.dumps(manifest.to_json())))  # as a file holds it
    planned = Source(Path("planned"), "planned", Trace.of([(manifest, tables)], "planned"))
    workspace = Workspace([Source(Path("gpt"), "gpt", recorded), planned])
    page = _text(DiffPage().layout(workspace, View(tab="diff", other=1)))
    assert "The peak shrank by" in page
    assert "The recording conditions differ" in page
    assert "checkpoint layers.*" in page
    assert "More recompute in backward: 0 operators in the base" in page
    assert len(page) < 150_000


def test_hostile_names_are_only_children() -> None:
    """A module or file named like markup stands in the page as text, and no part of the page takes markup."""
    ops = [Op("aten.mm.default", module="<img src=x>", makes=["y"], stack="<script>.py:1:f")]
    sources = [
        Source(Path(name), name, make_trace([ops], [Storage("y", size, module="<img src=x>")]))
        for name, size in (("<b>evil</b>", KIB), ("other", 2 * KIB))
    ]
    page = _text(DiffPage().layout(Workspace(sources), View(tab="diff", other=1)))
    assert "<img src=x>" in page
    assert "<b>evil</b>" in page
    assert "dangerously" not in page
    assert '"Markdown"' not in page
