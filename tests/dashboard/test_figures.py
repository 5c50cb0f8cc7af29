"""The memory timeline, on steps small enough to work out by hand."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("plotly")

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from plotly import graph_objects as go

from memprof.phases import PHASES
from memprof.replay.history import History
from memprof.trace.schema import CATEGORIES, Ints
from memprof.trace.store import Trace
from memprof.units import parse_bytes
from memprof_dashboard.figures import timeline as figures
from memprof_dashboard.figures.shared import COLUMNS, draw
from memprof_dashboard.figures.timeline_marks import Marks
from memprof_dashboard.pages.host import host_memory
from memprof_dashboard.palette import FILLS, PHASE_COLOURS, RECOMPUTED_COLOUR, THEMES, fill_of, phase_colours
from tests.browsing import as_plotly
from tests.building import Op, Storage, make_trace

timeline, overview = as_plotly(figures.timeline), as_plotly(figures.overview)
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
    """Builds a step of operators that each allocate and free a temporary, with one parameter of 1 KiB."""
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
        if trace.type == "scatter":
            assert list(trace.x) == [1, 2, 3, 4]
            assert trace.line.shape == "hv"


def test_peak_and_steps_are_marked(history: History) -> None:
    """The peak of what is shown, in words; the step's name at its beginning."""
    notes = {note.text: note for note in timeline(history, 0, 4, LIGHT).layout.annotations}
    assert set(notes) == {"step 0", "forward", "backward", "optimizer", "peak 9.00 KiB"}
    assert (notes["peak 9.00 KiB"].x, notes["peak 9.00 KiB"].y) == (2, 9)
    notes = {note.text: note for note in timeline(history, 0, 2, LIGHT).layout.annotations}
    assert "peak 7.00 KiB" in notes


def test_phases_are_a_band_below(history: History) -> None:
    """One bar for each run of operators of a phase, from its first operator to that of the next, named in the hover."""
    figure = timeline(history, 0, 4, LIGHT)
    (band,) = (trace for trace in figure.data if trace.type == "bar")
    assert list(band.customdata) == ["forward", "backward", "optimizer"]
    assert (band.x.tolist(), band.width.tolist(), band.offset) == ([0, 2, 3], [2, 1, 1], 0)
    assert figure.layout.hoversubplots == "axis"


def test_columns_begin_at_cuts() -> None:
    """Also within a column, so that each side of a cut keeps its own highest; without one, columns are as they were."""
    total = np.arange(5000, dtype=np.int64)
    drawn = draw(total, 0, 5000, 10, np.array([0, 4998, 4999, 5000]))
    assert drawn.left.tolist() == [*range(0, 5000, 500), 4998, 4999]
    assert drawn.op_ids.tolist() == [*range(499, 4500, 500), 4997, 4998, 4999]
    assert draw(total, 0, 5000, 10).left.tolist() == [*range(0, 5000, 500)]


def test_what_is_recomputed_has_a_colour_of_its_own() -> None:
    """In backward, the band below distinguishes operators that run again from those that run for the first time."""
    forward = Op("aten.relu.default", makes=["a"], reads=["w"], frees=["a"], module="first")
    again = Op("aten.relu.default", "backward", makes=["b"], reads=["w"], module="first", is_recompute=True)
    last = Op("aten.mm.default", "backward", makes=["g"], reads=["b"], frees=["b"])
    recomputing = History(make_trace([[forward, again, last]], [Storage(name, KIB, "activation") for name in "wabg"]))
    (band,) = (trace for trace in timeline(recomputing, 0, 3, LIGHT).data if trace.type == "bar")
    assert list(band.customdata) == ["forward", "recomputed", "backward"]
    assert len(set(band.marker.color)) == 3


def test_lines_of_cursor_budget_and_capacity(history: History) -> None:
    """The cursor's shape is the first, which callbacks move; without a cursor it has no width."""
    marks = Marks(at=2.5, budget_bytes=4 * KIB, capacity_bytes=10 * KIB)
    cursor, budget, capacity, *_ = timeline(history, 0, 4, LIGHT, marks).layout.shapes
    assert (cursor.x0, cursor.line.width) == (2.5, 1.5)
    assert (budget.y0, capacity.y0) == (4, 10)
    assert timeline(history, 0, 4, LIGHT).layout.shapes[0].line.width == 0


def test_height_is_shared_where_asked(history: History) -> None:
    """Two timelines side by side compare only at one scale."""
    assert timeline(history, 0, 4, LIGHT, Marks(most_bytes=90 * KIB)).layout.yaxis.range[1] >= 90


def test_peak_of_many_operators_is_drawn_to_the_byte() -> None:
    """Each pixel shows its operator with the highest total, with all categories; the minimum is a separate line."""
    count = 3 * COLUMNS
    sizes = np.random.default_rng(0).integers(1, 1 << 40, size=count)
    history = _many_operators(count, sizes)
    drawn = _drawn_bytes(timeline(history, 0, count, LIGHT))
    assert max(drawn["total"]) == history.total.max() == sizes.max() + KIB
    assert min(drawn["lowest"]) == history.total.min()
    np.testing.assert_allclose(np.add(drawn["parameters"], drawn["temporaries"]), drawn["total"], rtol=1e-6)
    title = timeline(history, 0, count, LIGHT).layout.xaxis.title.text
    assert title == "operator (each pixel: max of 3; dotted: min)"
    assert max(overview(history, 0, 10, LIGHT).data[0].y) == pytest.approx(history.total.max() / (1 << 30), rel=1e-6)


@settings(max_examples=200)
@given(
    npst.arrays(np.int64, st.integers(1, 400), elements=st.integers(0, 2**50)),
    st.integers(1, 60),
    st.data(),
)
def test_columns_keep_the_extremes(total: Ints, columns: int, data: st.DataObject) -> None:
    """In any range, each pixel's operator is its first maximum, its low is its minimum, and pixels cover the range."""
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
    """Colour and hatching together distinguish any two; an unknown one looks unknown."""
    looks = [(FILLS[category].colour, FILLS[category].pattern) for category in CATEGORIES]
    assert len(set(looks)) == len(CATEGORIES)
    assert fill_of("new").pattern == FILLS["unknown"].pattern


def test_recording_is_drawn_as_it_was_counted() -> None:
    """On a sample: every operator's total is the allocator's own count."""
    from memprof.trace.schema import Memory

    trace = Trace.open(Path(__file__).parents[2] / "sample_traces" / "gpt" / "run.memprof")
    history = History(trace)
    memory = trace.table(Memory)
    assert (history.total[memory.op_id] == memory.allocated_bytes).all()


#: How people see who lack one of the three cones (Machado, Oliveira and Fernandes 2009, severity 1), on linear RGB.
VISIONS = {
    "all": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def _lab(colour: str, vision: list[list[float]]) -> np.ndarray:
    """CIELAB values of a color as perceived."""
    rgb = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.clip(vision @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4), 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    f = np.cbrt(xyz / [0.95047, 1, 1.08883])
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISIONS)
def test_colours_of_phases_are_told_apart(vision: str) -> None:
    """Also by the colour-blind: 2.3 is a difference just seen; every pair is six times that apart."""
    phases = phase_colours([*PHASES, *"abcde"])
    assert len(phases) == len(PHASES) + 5
    seen = [_lab(colour, VISIONS[vision]) for colour in [*phases.values(), RECOMPUTED_COLOUR]]
    assert min(float(np.linalg.norm(one - other)) for one, other in combinations(seen, 2)) > 6 * 2.3


def test_phases_that_a_job_names_have_colours_in_turn() -> None:
    """The band knows them by their names; after the last colour comes the first."""
    names = [f"phase {number}" for number in range(7)]
    colours = phase_colours(["forward", *names])
    assert colours["forward"] == PHASE_COLOURS["forward"]
    assert colours["phase 0"] == colours["phase 5"] != colours["phase 1"]
    named = History(make_trace([[Op(), Op(phase="rollout"), Op(phase="evaluation")]], [Storage("w", KIB)]))
    (band,) = (trace for trace in timeline(named, 0, 3, LIGHT).data if trace.type == "bar")
    assert list(band.customdata) == ["forward", "rollout", "evaluation"]
    assert list(band.marker.color) == [
        phase_colours(named.phases)[name] for name in ("forward", "rollout", "evaluation")
    ]


def test_narrow_peak_is_enlarged_in_an_inset() -> None:
    """Two operators of 2,000 that are higher than the rest: the inset shows them, to the byte, and covers nothing."""
    sizes = np.full(2000, 10 * KIB, dtype=np.int64)
    sizes[[700, 701]] = 40 * KIB
    history = _many_operators(2000, sizes)
    figure = timeline(history, 0, 2000, LIGHT)
    (inside,) = (line for line in figure.data if line.xaxis == "x3" and line.line.width)
    assert max(inside.y) == 41
    assert figure.layout.xaxis3.range == (694, 708)
    low, _ = figure.layout.yaxis3.domain
    assert low > 0.08 + 0.92 * 11 / (1.12 * 41)  # above all that is drawn below it
    assert figure.layout.xaxis3.domain[1] < 0.35  # the label of the peak is on its other side
    assert not any(line.xaxis == "x3" for line in timeline(history, 690, 710, LIGHT).data)
    slope = (10 * KIB + 20 * KIB * (1 - abs(np.arange(2000) - 710) / 1300)).astype(np.int64)
    slope[[710, 711]] += 20 * KIB
    assert "xaxis3" in figures.timeline(_many_operators(2000, slope), 0, 2000, LIGHT).layout
    history.step[200:1500], history.step[1500:] = 1, 2
    steps = [shape for shape in timeline(history, 0, 2000, LIGHT).layout.shapes if shape.line.dash == "dot"]
    assert [(shape.x0, shape.y1) for shape in steps] == [(200, low), (1500, 1)]


def test_columns_are_equally_long_on_an_axis_of_time() -> None:
    """One operator that runs as long as all others has a column of its own, and the peak stays the true one."""
    clock = np.concatenate((np.arange(1024) / 1024, [2.0]))
    drawn = draw(np.arange(1024), 0, 1024, 8, clock=clock)
    assert drawn.left.tolist() == [0, 256, 512, 768, 1023]
    assert drawn.op_ids.tolist() == [255, 511, 767, 1022, 1023]


def test_the_hover_has_no_zeros(history: History) -> None:
    """An area says nothing where it has none."""
    figure = timeline(history, 0, 4, LIGHT)
    (gradients,) = (line for line in figure.data if line.name == "gradients")
    assert list(gradients.hoverinfo) == ["none", "none", "all", "all", "all"]


def test_host_memory_is_held_from_sample_to_sample() -> None:
    """Areas sum to what was sampled and the last is held as well; mapped files are a line, a limit in reach one."""
    parts = {"trainer": np.array([4, 6, 5]), "worker": np.array([0, 1, 3]), "mapped files": np.array([2, 2, 2])}
    parts = {name: sizes * KIB for name, sizes in parts.items()}
    marks = Marks(at=1.5, axis=(1.0, 1.6), device="control <b>group</b>", capacity_bytes=16 * KIB)
    figure = host_memory(np.array([0.0, 1.0, 3.0]), parts, LIGHT, marks)
    areas = [trace for trace in figure.data if trace.stackgroup]
    assert np.sum([area.y for area in areas], axis=0).tolist() == [4, 7, 8, 8]
    assert areas[0].x.tolist() == [0, 1, 3, 4.5]
    assert {area.line.shape for area in areas} == {"hv"}
    (line,) = [trace for trace in figure.data if trace.name == "mapped files"]
    assert line.stackgroup is None
    listed = [trace.name for trace in figure.data if trace.showlegend is not False]
    assert listed == ["trainer  6.00 KiB", "workers  1.00 KiB", "mapped files  2.00 KiB"]  # at 1.5 s
    assert [(one.x0, one.x1, one.y0) for one in figure.layout.shapes] == [(1.5, 1.5, 0), (0, 4.5, 16), (1, 1.6, 0)]
    texts = [one.text for one in figure.layout.annotations]
    assert texts == ["control &lt;b&gt;group&lt;/b&gt; 16.00 KiB", "peak 8.00 KiB"]
    bare = host_memory(np.arange(3.0), parts, LIGHT, Marks())
    assert [one.text for one in bare.layout.annotations] == ["peak 8.00 KiB"]
    assert bare.data[1].name == "trainer  5.00 KiB"  # without a cursor, at the peak


def test_host_memory_of_a_long_run_keeps_its_peak() -> None:
    """Of more samples than columns, the fullest of each is drawn."""
    sizes = np.full(50_000, KIB)
    sizes[31_415] = 9 * KIB
    area = host_memory(np.arange(50_000.0), {"trainer": sizes}, LIGHT, Marks()).data[0]
    assert len(area.x) <= COLUMNS + 1
    assert area.y.max() == 9
