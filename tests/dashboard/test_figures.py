"""The memory timeline, on steps small enough to work out by hand."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("plotly")

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from plotly import graph_objects as go

from memprof.replay.history import History
from memprof.trace.schema import CATEGORIES, Ints
from memprof.trace.store import Trace
from memprof.units import parse_bytes
from memprof_dashboard.figures.timeline import COLUMNS, Marks, draw, overview, timeline
from memprof_dashboard.palette import FILLS, THEMES, fill_of
from tests.building import Op, Storage, make_trace

KIB = 1024
LIGHT = THEMES["light"]


@pytest.fixture
def history() -> History:
    """Builds a step of four operators whose peak, 9 KiB, lies in the third.

    ====================  =====  =====  =====  =====
    KiB alive during op   0      1      2      3
    ====================  =====  =====  =====  =====
    parameter             1      1      1      1
    activation            2      6      4      0
    gradient              0      0      1      1
    workspace             0      0      3      0
    total                 3      7      9      2
    ====================  =====  =====  =====  =====
    """
    return History(
        make_trace(
            [
                [
                    Op("aten.relu.default", makes=["a"], reads=["w"], module="first"),
                    Op("aten.mm.default", makes=["b"], reads=["w", "a"], frees=["a"], module="second"),
                    Op(
                        "aten.mm.default",
                        "backward",
                        makes=["g"],
                        reads=["b"],
                        frees=["b"],
                        workspace=3 * KIB,
                        module="second",
                    ),
                    Op("aten.add_.Tensor", "optimizer", reads=["g"], mutates=["w"]),
                ]
            ],
            [
                Storage("w", 1 * KIB, "parameter"),
                Storage("a", 2 * KIB, "activation"),
                Storage("b", 4 * KIB, "activation"),
                Storage("g", 1 * KIB, "gradient"),
            ],
        )
    )


def _many_operators(count: int, sizes: Ints) -> History:
    """Builds a step of operators that each make a temporary and free it, beside one parameter of 1 KiB."""
    made = make_trace(
        [[Op(makes=[f"t{at}"], frees=[f"t{at}"], reads=["w"]) for at in range(count)]],
        [Storage("w", KIB, "parameter"), *(Storage(f"t{at}", int(sizes[at]), "temporary") for at in range(count))],
    )
    return History(made)


def _drawn_bytes(figure: go.Figure) -> dict[str, list[float]]:
    """Takes the bytes off a figure's lines and areas, without the point that ends the last stair."""
    unit = parse_bytes(f"1 {figure.layout.yaxis.title.text}")
    return {
        trace.name: (np.asarray(trace.y, dtype=np.float64) * unit).tolist()[:-1]
        for trace in figure.data
        if trace.type == "scatter"
    }


def test_areas_hold_what_is_alive_during_each_operator(history: History) -> None:
    """Worked out by hand above; a category that holds nothing is left out."""
    assert _drawn_bytes(timeline(history, 0, 4, LIGHT)) == {
        "parameters": [1 * KIB] * 4,
        "activations": [2 * KIB, 6 * KIB, 4 * KIB, 0],
        "gradients": [0, 0, 1 * KIB, 1 * KIB],
        "kernel workspace": [0, 0, 3 * KIB, 0],
        "total": [3 * KIB, 7 * KIB, 9 * KIB, 2 * KIB],
    }


def test_lines_are_stairs_that_end_where_the_stretch_does(history: History) -> None:
    """Memory changes at operators and not between them; the last stair has a width."""
    for trace in timeline(history, 1, 4, LIGHT).data:
        assert list(trace.x) == [1, 2, 3, 4]
        if trace.type == "scatter":
            assert trace.line.shape == "hv"


def test_peak_and_steps_are_marked(history: History) -> None:
    """The peak of what is shown, in words; the step's name at its beginning."""
    notes = {note.text: note for note in timeline(history, 0, 4, LIGHT).layout.annotations}
    assert set(notes) == {"step 0", "peak 9.00 KiB"}
    assert (notes["peak 9.00 KiB"].x, notes["peak 9.00 KiB"].y) == (2, 9)
    notes = {note.text: note for note in timeline(history, 0, 2, LIGHT).layout.annotations}
    assert "peak 7.00 KiB" in notes


def test_phases_are_a_band_below(history: History) -> None:
    """One colour for each operator's phase, named when pointed at."""
    (band,) = (trace for trace in timeline(history, 0, 4, LIGHT).data if trace.type == "heatmap")
    assert np.asarray(band.text).tolist() == [["forward", "forward", "backward", "optimizer"]]


def test_what_is_recomputed_has_a_colour_of_its_own() -> None:
    """In backward, the band below tells operators that run again from those that run for the first time."""
    forward = Op("aten.relu.default", makes=["a"], reads=["w"], frees=["a"], module="first")
    again = Op("aten.relu.default", "backward", makes=["b"], reads=["w"], module="first", is_recompute=True)
    last = Op("aten.mm.default", "backward", makes=["g"], reads=["b"], frees=["b"])
    recomputing = History(make_trace([[forward, again, last]], [Storage(name, KIB, "activation") for name in "wabg"]))
    (band,) = (trace for trace in timeline(recomputing, 0, 3, LIGHT).data if trace.type == "heatmap")
    assert np.asarray(band.text).tolist() == [["forward", "recomputed", "backward"]]
    assert len({int(code) for code in np.asarray(band.z)[0]}) == 3


def test_lines_of_cursor_budget_and_capacity(history: History) -> None:
    """The cursor's shape is the first, which callbacks move; without a cursor it has no width."""
    marks = Marks(at=2, budget_bytes=4 * KIB, capacity_bytes=10 * KIB)
    cursor, budget, capacity, *_ = timeline(history, 0, 4, LIGHT, marks).layout.shapes
    assert (cursor.x0, cursor.line.width) == (2.5, 1.5)
    assert (budget.y0, capacity.y0) == (4, 10)
    assert timeline(history, 0, 4, LIGHT).layout.shapes[0].line.width == 0


def test_height_is_shared_where_asked(history: History) -> None:
    """Two timelines side by side compare only at one scale."""
    assert timeline(history, 0, 4, LIGHT, Marks(most_bytes=90 * KIB)).layout.yaxis.range[1] >= 90


def test_peak_of_many_operators_is_drawn_to_the_byte() -> None:
    """Columns show their fullest operator with all categories at it; the lowest of each is a line of its own."""
    count = 3 * COLUMNS
    sizes = np.random.default_rng(0).integers(1, 1 << 40, size=count)
    history = _many_operators(count, sizes)
    drawn = _drawn_bytes(timeline(history, 0, count, LIGHT))
    assert max(drawn["total"]) == history.total.max() == sizes.max() + KIB
    assert min(drawn["lowest"]) == history.total.min()
    np.testing.assert_allclose(np.add(drawn["parameters"], drawn["temporaries"]), drawn["total"], rtol=1e-6)
    title = timeline(history, 0, count, LIGHT).layout.xaxis.title.text
    assert title == "operator, in order; each column shows the fullest of 3"
    assert max(overview(history, 0, 10, LIGHT).data[0].y) == pytest.approx(history.total.max() / (1 << 30), rel=1e-6)


@settings(max_examples=200)
@given(
    npst.arrays(np.int64, st.integers(1, 400), elements=st.integers(0, 2**50)),
    st.integers(1, 60),
    st.data(),
)
def test_columns_keep_the_extremes(total: Ints, columns: int, data: st.DataObject) -> None:
    """Of any stretch: each column's operator is its first fullest, its low is its lowest, and columns cover it all."""
    first = data.draw(st.integers(0, len(total) - 1))
    end = data.draw(st.integers(first + 1, len(total)))
    drawn = draw(total, first, end, columns)
    assert len(drawn.op_ids) <= max(columns, 1) or drawn.is_exact
    edges = np.append(drawn.left, end)
    assert edges[0] == first
    assert (np.diff(edges) > 0).all()
    for left, right, op_id, low in zip(edges, edges[1:], drawn.op_ids, drawn.lows, strict=False):
        assert op_id == left + total[left:right].argmax()
        assert low == total[left:right].min()


def test_hostile_names_are_text() -> None:
    """A category's name of a newer trace is shown as it is, never as markup."""
    storages = [Storage("w", KIB, "<b>new</b>")]
    history = History(make_trace([[Op(reads=["w"])]], storages))
    names = [trace.name for trace in timeline(history, 0, 1, LIGHT).data]
    assert "&lt;b&gt;new&lt;/b&gt;" in names
    assert timeline(history, 0, 1, LIGHT, Marks(title="<i>x</i>")).layout.title.text == "&lt;i&gt;x&lt;/i&gt;"


def test_every_category_of_the_schema_has_a_look_of_its_own() -> None:
    """Colour and hatching together tell any two apart; one that is not known looks unknown."""
    looks = [(FILLS[category].colour, FILLS[category].pattern) for category in CATEGORIES]
    assert len(set(looks)) == len(CATEGORIES)
    assert fill_of("new").pattern == FILLS["unknown"].pattern


def test_recording_is_drawn_as_it_was_counted() -> None:
    """On a sample: every operator's total is the allocator's own count."""
    from memprof.trace.schema import Memory
    from tests.benchmarks.recording import SAMPLES

    trace = Trace.open(SAMPLES / "gpt" / "run.memprof")
    history = History(trace)
    memory = trace.table(Memory)
    assert (history.total[memory.op_id] == memory.allocated_bytes).all()
