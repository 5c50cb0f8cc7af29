"""The boxes of the modules, on moments small enough to work out by hand and against the replay of real recordings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("plotly")

from memprof.analysis.report.module_tree import folded_tree
from memprof.replay.history import History
from memprof.replay.live import alive_at, live_bytes_by_category
from memprof.trace.schema import NONE, Modules
from memprof.trace.store import Trace
from memprof_dashboard.figures.boxes import treemap
from memprof_dashboard.palette import THEMES
from memprof_dashboard.views.boxes import (
    OUTSIDE,
    Box,
    boxes_by_category,
    boxes_by_module,
    bytes_by_node,
    find_text,
    simplified,
)
from tests.building import Module, Op, Storage, make_trace

SAMPLES = Path(__file__).parents[2] / "sample_traces"
LIGHT = THEMES["light"]


@pytest.fixture
def trace() -> Trace:
    """Three alike layers of 10 bytes of weight each, activations of 5, 6 and 7, 100 bytes of no module, 3 inside."""
    layers = [f"layers.{number}" for number in range(3)]
    return make_trace(
        [
            [
                Op(makes=["a0"], reads=["w0"], module="layers.0"),
                Op(makes=["a1"], reads=["w1"], module="layers.1"),
                Op(makes=["a2"], reads=["w2", "x"], module="layers.2", workspace=3),
            ]
        ],
        [
            *(Storage(f"w{number}", 10, "parameter", module=name) for number, name in enumerate(layers)),
            *(Storage(f"a{number}", 5 + number, module=name) for number, name in enumerate(layers)),
            Storage("x", 100, "input"),
        ],
        [Module("", "Net"), Module("layers", "ModuleList"), *(Module(name) for name in layers)],
    )


def _boxes(trace: Trace, at: int, *, by_category: bool = False) -> list[Box]:
    tree = folded_tree(trace.table(Modules))
    split = bytes_by_node(History(trace), tree, at)
    return boxes_by_category(split, tree, {}) if by_category else boxes_by_module(split, tree)


def _labelled(boxes: list[Box], label: str) -> Box:
    (found,) = [box for box in boxes if box.label == label]
    return found


def test_alike_layers_share_a_box(trace: Trace) -> None:
    """Layers that are alike are one box of all their bytes, and what belongs to no module is a box of its own."""
    boxes = _boxes(trace, 2)
    layer = _labelled(boxes, "* Linear \N{MULTIPLICATION SIGN}3")
    assert (layer.size, layer.category) == (30 + 18 + 3, "parameter")
    assert (_labelled(boxes, OUTSIDE).size, boxes[0].size) == (100, 151)


def test_category_boxes_hold_their_modules(trace: Trace) -> None:
    """By category each box holds those of its modules, and the categories sum to the total."""
    boxes = _boxes(trace, 2, by_category=True)
    categories = {box.label: box.size for box in boxes if box.parent == 0}
    assert categories == {"input": 100, "parameter": 30, "activation": 18, "workspace": 3}


@pytest.mark.parametrize("by_category", [False, True])
@pytest.mark.parametrize("sample", ["gpt", "resnet", "lstm"])
def test_boxes_sum_to_the_total(sample: str, *, by_category: bool) -> None:
    """At every moment the innermost boxes sum to the bytes alive, and each box to those inside it."""
    trace = Trace.open(SAMPLES / sample / "run.memprof")
    history = History(trace)
    for at in np.linspace(0, history.ops - 1, 12).astype(int).tolist():
        boxes = _boxes(trace, at, by_category=by_category)
        assert boxes[0].size == history.total[at]
        inside = [0] * len(boxes)
        for box in boxes[1:]:
            inside[box.parent] += box.size
        assert all(size in (0, box.size) for size, box in zip(inside, boxes, strict=True))


def test_boxes_agree_with_the_replay() -> None:
    """Categories and modules hold what the replay of the step says."""
    trace = Trace.open(SAMPLES / "gpt" / "run.memprof")
    step, history = trace.steady_step(), History(trace)
    tree = folded_tree(trace.table(Modules))
    here = history.peak(step.first_op_id, step.first_op_id + len(step.ops)) - step.first_op_id
    split = bytes_by_node(history, tree, step.first_op_id + here)
    by_category = {name: int(alive[here]) for name, alive in live_bytes_by_category(step).items() if alive[here]}
    assert {name: int(sums.sum()) for name, sums in split.items()} == by_category
    by_node = np.zeros(len(tree) + 1, dtype=np.int64)
    alive = step.storages.take(alive_at(step, here))
    modules = [*alive.module_id, step.ops.module_id[here]]
    for module, size in zip(modules, [*alive.allocated_bytes, step.ops.workspace_bytes[here]], strict=True):
        by_node[NONE if module == NONE else tree.node_of_module[module]] += size
    assert np.array_equal(sum(split.values()), by_node)


def test_small_modules_are_summed_up() -> None:
    """Of more modules than boxes the smallest are summed up, and nothing is lost."""
    names = [f"part{number}x" for number in range(900)]
    storages = [Storage(name, 1 + number, "parameter", module=name) for number, name in enumerate(names)]
    trace = make_trace([[Op(reads=names)]], storages, [Module("", "Net"), *(Module(name) for name in names)])
    boxes = _boxes(trace, 0)
    assert len(boxes) < 500
    assert boxes[0].size == sum(range(1, 901))
    assert _labelled(boxes, "own and smaller submodules").size == sum(range(1, 902 - 400))


def test_memory_given_back_first_has_no_box() -> None:
    """An operator that frees memory before it allocates has negative workspace, which has no box."""
    trace = make_trace([[Op(makes=["a"], module="fc", workspace=-4)]], [Storage("a", 10, module="fc")])
    assert _boxes(trace, 0)[0].size == 10


@pytest.mark.parametrize(
    ("title", "found"), [("layers.*.mlp", ".mlp"), ("layers.*", "layers."), ("head", "head"), ("a.*.b.*.0", ".b.")]
)
def test_search_of_a_folded_name(title: str, found: str) -> None:
    """A folded module is searched for by a part of its name that all it stands for share, its end if it has letters."""
    assert find_text(title) == found


def test_names_are_no_markup() -> None:
    """A module's name cannot bring markup into the figure."""
    trace = make_trace([[Op(makes=["a"], module="<b>x</b>")]], [Storage("a", 10, module="<b>x</b>")])
    labels = treemap(_boxes(trace, 0), LIGHT).data[0].labels
    assert not any("<" in label for label in labels)
    assert any("&lt;b&gt;x" in label for label in labels)


def test_searched_box_is_framed(trace: Trace) -> None:
    """The box whose module is searched for is framed, and only that."""
    (drawn,) = treemap(_boxes(trace, 2), LIGHT, find="layers.").data
    wide = [label for label, width in zip(drawn.labels, drawn.marker.line.width, strict=True) if width > 1]
    assert len(wide) == 1
    assert "* Linear \N{MULTIPLICATION SIGN}3" in wide[0]


def test_treemap_is_split_by_category_and_single_boxes_are_one() -> None:
    """The innermost boxes are split; a chain of boxes of one size is one box, named by all of them."""
    boxes = [
        Box(NONE, "live bytes", 100, "activation"),
        Box(0, "GPT", 90, "activation"),
        Box(1, "layers", 90, "activation"),
        Box(2, "mlp", 60, "activation", split={"parameter": 20, "activation": 40}),
        Box(2, "norm", 30, "activation", split={"activation": 29, "parameter": 1}),
        Box(0, "outside", 10, "input"),
    ]
    made = simplified(boxes, str.upper)
    assert [(one.label, one.size, one.parent) for one in made] == [
        ("live bytes", 100, NONE),
        ("GPT / layers", 90, 0),
        ("outside", 10, 0),
        ("mlp", 60, 1),
        ("ACTIVATION", 40, 3),
        ("PARAMETER", 20, 3),
        ("norm", 30, 1),
    ]


def test_nothing_alive_is_a_sentence() -> None:
    """A moment without live storages shows a message."""
    trace = make_trace([[Op()]], [])
    assert "No storage is live" in treemap(_boxes(trace, 0), LIGHT).layout.annotations[0].text
