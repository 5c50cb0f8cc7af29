"""The memory timeline, on steps small enough to work out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("plotly")

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from plotly import graph_objects as go

from memprof.replay.live import live_bytes
from memprof.trace.schema import CATEGORIES, Ints
from memprof.trace.step import Step
from memprof_dashboard import figures
from memprof_dashboard.figures import FILLS, MOST_OPERATORS, choose_operators, memory_timeline
from tests.building import Op, Storage, make_step

KIB = 1024


@pytest.fixture
def step() -> Step:
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
    return make_step(
        [
            Op("aten.relu.default", makes=["a"], reads=["w"], module="first"),
            Op("aten.mm.default", makes=["b"], reads=["w", "a"], frees=["a"], module="second"),
            Op(
                "aten.mm.default", "backward", makes=["g"], reads=["b"], frees=["b"], workspace=3 * KIB, module="second"
            ),
            Op("aten.add_.Tensor", "optimizer", reads=["g"], mutates=["w"]),
        ],
        [
            Storage("w", 1 * KIB, "parameter"),
            Storage("a", 2 * KIB, "activation"),
            Storage("b", 4 * KIB, "activation"),
            Storage("g", 1 * KIB, "gradient"),
        ],
    )


def _many_operators(count: int, sizes: Ints) -> Step:
    """Builds a step of operators that each make a temporary and free it, beside one parameter of 1 KiB."""
    return make_step(
        [Op(makes=[f"t{at}"], frees=[f"t{at}"], reads=["w"]) for at in range(count)],
        [Storage("w", KIB, "parameter"), *(Storage(f"t{at}", int(sizes[at]), "temporary") for at in range(count))],
    )


def _drawn_bytes(figure: go.Figure) -> dict[str, list[float]]:
    """Takes the exact bytes off a figure, without the point that ends the last stair."""
    return {trace.name: np.asarray(trace.customdata).tolist()[:-1] for trace in figure.data}


def test_areas_hold_what_is_alive_during_each_operator(step: Step) -> None:
    """Each category's area is the bytes worked out by hand, and empty categories are left out."""
    assert _drawn_bytes(memory_timeline(step)) == {
        "parameters": [1 * KIB, 1 * KIB, 1 * KIB, 1 * KIB],
        "gradients": [0, 0, 1 * KIB, 1 * KIB],
        "activations": [2 * KIB, 6 * KIB, 4 * KIB, 0],
        "kernel workspace": [0, 0, 3 * KIB, 0],
        "total": [3 * KIB, 7 * KIB, 9 * KIB, 2 * KIB],
    }


def test_drawn_heights_are_in_the_unit_of_the_axis(step: Step) -> None:
    """The axis says KiB for a peak of 9 KiB, and the total is drawn in it."""
    figure = memory_timeline(step)
    assert figure.layout.yaxis.title.text == "KiB"
    assert np.asarray(figure.data[-1].y).tolist()[:-1] == [3, 7, 9, 2]


def test_lines_are_stairs(step: Step) -> None:
    """Memory does not change between two operators: every line is a staircase, the last stair as wide as the others."""
    for trace in memory_timeline(step).data:
        assert trace.line.shape == "hv"
        assert np.asarray(trace.x).tolist() == [0, 1, 2, 3, 4]
        assert trace.y[-1] == trace.y[-2]


def test_peak_is_marked_where_it_is(step: Step) -> None:
    """The mark stands at the operator of the peak and says how much, in which operator, phase and module."""
    (mark,) = memory_timeline(step).layout.annotations
    assert (mark.x, mark.y) == (2, 9)
    assert mark.text == "peak 9.00 KiB<br>aten.mm.default, backward of second"


def test_peak_of_a_long_step_is_drawn_to_the_byte() -> None:
    """With more operators than are drawn, the drawn peak is still the true peak, and the areas sum to the total."""
    count = MOST_OPERATORS + 1_000
    sizes = np.full(count, 8 * KIB)
    sizes[4_321] = 1_000_003  # one operator among many, of an odd size
    sizes[1_234] = 0
    step = _many_operators(count, sizes)
    drawn = _drawn_bytes(memory_timeline(step))
    total = drawn.pop("total")
    assert max(total) == 1_000_003 + KIB == live_bytes(step).during.max()
    assert min(total) == KIB
    assert len(total) <= MOST_OPERATORS
    assert np.sum(list(drawn.values()), axis=0).tolist() == total


def test_a_long_step_says_what_is_drawn(monkeypatch: pytest.MonkeyPatch, step: Step) -> None:
    """A picture that leaves operators out says so on its axis."""
    assert memory_timeline(step).layout.xaxis.title.text == "operator"
    monkeypatch.setattr(figures, "MOST_OPERATORS", 4)
    longer = _many_operators(9, np.array([5, 5, 5, 9, 5, 1, 5, 5, 5]) * KIB)
    title = memory_timeline(longer).layout.xaxis.title.text
    assert title == "operator (4 of 9 operators: the lowest and the highest of each stretch)"


def test_hostile_names_are_text() -> None:
    """Markup in an operator's or a module's name is shown, not obeyed."""
    name = "<a href='javascript:x'>%{y}</a>"
    step = make_step([Op(name, makes=["a"], module=name)], [Storage("a", KIB)])
    figure = memory_timeline(step)
    escaped = "&lt;a href=&#x27;javascript:x&#x27;&gt;%{y}&lt;/a&gt;"
    assert figure.layout.annotations[0].text == f"peak 1.00 KiB<br>{escaped}, forward of {escaped}"
    assert figure.data[-1].text[0] == f"{escaped}, forward of {escaped}"
    assert all("%{y}</a>" not in trace.hovertemplate for trace in figure.data)


def test_a_step_without_operators_says_so(step: Step) -> None:
    """Nothing recorded gives a sentence, not an empty frame."""
    nothing = slice(0, 0)
    figure = memory_timeline(
        replace(step, ops=step.ops.take(nothing), uses=step.uses.take(nothing), storages=step.storages.take(nothing))
    )
    assert not figure.data
    assert figure.layout.annotations[0].text == "Step 0 has no recorded operators."


def test_a_category_of_a_newer_trace_is_drawn() -> None:
    """A category this version does not know is drawn under its own name, so that the areas still sum to the total."""
    step = make_step([Op(makes=["a"])], [Storage("a", KIB, "<new>")])
    assert _drawn_bytes(memory_timeline(step)) == {"&lt;new&gt;": [KIB], "total": [KIB]}


def test_every_category_of_the_schema_has_a_look_of_its_own() -> None:
    """No category is left out of the picture, and no two look alike."""
    assert set(FILLS) == set(CATEGORIES)
    assert len({(fill.colour, fill.pattern) for fill in FILLS.values()}) == len(CATEGORIES)


@settings(max_examples=100, deadline=None)
@given(
    total=npst.arrays(np.int64, st.integers(1, 300), elements=st.integers(0, 2**50)),
    most=st.integers(4, 60),
)
def test_chosen_operators_keep_the_extremes(total: Ints, most: int) -> None:
    """Whatever the curve: first peak, lowest value, both ends are drawn; in order, each once, no more than asked."""
    chosen = choose_operators(total, most)
    assert {0, len(total) - 1, int(total.argmax())} <= set(chosen.tolist())
    assert total[chosen].min() == total.min()
    assert (np.diff(chosen) > 0).all()
    assert len(chosen) <= most
