"""Lives of storages by address, on recordings small enough to work out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("plotly")

from hypothesis import given
from hypothesis import strategies as st
from plotly.utils import PlotlyJSONEncoder

from memprof.replay.history import History
from memprof.trace.manifest import Manifest
from memprof.trace.schema import NONE, AllocatorEvents, Ops, Steps, Storages, Uses
from memprof.trace.store import Trace
from memprof_dashboard.figures.blocks import Rectangles, blocks
from memprof_dashboard.pages.blocks import BlocksPage, _clicked, _jump, _rectangles
from memprof_dashboard.palette import THEMES
from memprof_dashboard.sources import Rank, Source, Workspace
from memprof_dashboard.state import View
from memprof_dashboard.views import placement
from memprof_dashboard.views.block_texts import drawn_sentence, life_sentence, placed_sentence, waste_table
from memprof_dashboard.views.placement import addresses_of, compress, first_fit
from memprof_dashboard.views.storage_lives import MOST_BLOCKS, StorageLives, choose_blocks, cut_stretch, find_idle
from tests.building import Op, Storage, Tables, make_tables

LIGHT = THEMES["light"]
SAMPLES = Path(__file__).parents[2] / "sample_traces"


def _tables() -> Tables:
    """Two steps: ``a`` is used last by the second operator and freed after the third, ``b`` is used to its end.

    The weight was there before. The allocator's events of storage row ``n`` are at 0x1000 * (n + 1).
    """
    step = [
        Op("aten.relu.default", makes=["a"], reads=["w"], module="fc"),
        Op("aten.mm.default", makes=["b"], reads=["w", "a"]),
        Op("aten.mm.default", "backward", reads=["b"], frees=["a"]),
        Op("aten.add_.Tensor", "optimizer", reads=["b"], mutates=["w"], frees=["b"]),
    ]
    storages = [
        Storage("w", 100, "parameter", name="fc.weight", module="fc"),
        Storage("a", 30, module="fc"),
        Storage("b", 50),
    ]
    return make_tables([step, step], storages)


def _trace(tables: Tables) -> Trace:
    return Trace.of([(Manifest(target="train.py"), tables)], Path("made-by-hand.memprof"))


def _untold() -> Tables:
    return {**_tables(), AllocatorEvents: AllocatorEvents.empty()}


def _lives(trace: Trace) -> StorageLives:
    return StorageLives(trace, History(trace))


def _rank(tables: Tables) -> Rank:
    return Rank(_trace(tables))


def _text(component: object) -> str:
    return json.dumps(component, cls=PlotlyJSONEncoder, ensure_ascii=False)


def test_addresses_are_those_of_the_events() -> None:
    """Each storage has the address at which it was allocated; one that was there before has none."""
    assert addresses_of(_trace(_tables())).tolist() == [NONE, 0x2000, 0x3000, 0x4000, 0x5000]


def test_address_used_again_belongs_to_both() -> None:
    """Two storages that live one after the other at the same address both have it."""
    tables = _tables()
    events: Any = tables[AllocatorEvents]
    tables[AllocatorEvents] = events.replace(
        address=np.where(events.address >= 0x4000, events.address - 0x2000, events.address)
    )
    assert addresses_of(_trace(tables)).tolist() == [NONE, 0x2000, 0x3000, 0x2000, 0x3000]


def test_what_is_freed_in_the_recording_has_its_address() -> None:
    """A storage that was there before is found by its free."""
    tables = make_tables([[Op(reads=["x"], frees=["x"])]], [Storage("x", 70, "input")])
    assert addresses_of(_trace(tables)).tolist() == [0x1000]


def test_temporaries_of_equal_size_are_told_apart() -> None:
    """A temporary that is gone within its operator does not lend its address to a storage of the same size."""
    tables = make_tables([[Op(makes=["a"]), Op(reads=["a"], frees=["a"])]], [Storage("a", 64)])
    tables[AllocatorEvents] = AllocatorEvents.of(
        index=range(4),
        device=["cpu"] * 4,
        action=["alloc", "free", "alloc", "free"],
        address=[0x9000, 0x9000, 0x5000, 0x5000],
        size_bytes=[64] * 4,
        op_id=[0, 0, 0, 1],
    )
    assert addresses_of(_trace(tables)).tolist() == [0x5000]


@pytest.mark.parametrize("sample", ["gpt", "resnet", "lstm"])
def test_addresses_of_real_recordings_never_overlap(sample: str) -> None:
    """Nearly all storages allocated in a recording have an address, and no two share one while both are live."""
    lives = _lives(Trace.open(SAMPLES / sample / "run.memprof"))
    history = lives.history
    is_born = (history.created != NONE) & (history.size > 0)
    assert (lives.address[is_born] != NONE).mean() > 0.98
    known = np.flatnonzero((lives.address != NONE) & (history.created != NONE) & (history.freed != NONE))
    for at in range(0, history.ops, history.ops // 20):
        # What is freed after an operator may lie where the next one's does, not where what lives through it does.
        rows = known[(history.created[known] < at) & (history.freed[known] > at)]
        rows = rows[np.argsort(lives.address[rows])]
        ends = lives.address[rows] + history.size[rows]
        assert (ends[:-1] <= lives.address[rows][1:]).all()


def test_huge_gaps_are_cut_and_holes_stay() -> None:
    """A gap between mappings is cut out; a hole between neighbours keeps its size."""
    compressed = compress(np.array([1000, 1200, 1_000_000, 1_000_300]), np.array([198, 800, 300, 700]))
    assert compressed.cuts == 1
    # 1998 bytes are covered: gaps of more than 99 are huge, and 24 of one are left.
    assert compressed.cut_bytes == 99
    assert compressed.y.tolist() == [0, 200, 1000 + 24, 1300 + 24]
    assert compressed.top == 2024


def test_first_fit_takes_the_lowest_room() -> None:
    """A block takes the lowest gap that is large enough and free for all its life."""
    y = first_fit(np.array([0, 0, 2, 3]), np.array([9, 2, 9, 9]), np.array([10, 20, 5, 16]))
    # By size at equal births: 20 at 0, 10 at 20; the 20 dies at 2, so 5 goes to 0, and 16 fits above all only.
    assert y.tolist() == [20, 0, 0, 30]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20), st.integers(1, 50)), max_size=40))
def test_packed_blocks_never_overlap(drawn: list[tuple[int, int, int]]) -> None:
    """No two blocks that live at once share a byte."""
    left = np.array([birth for birth, _, _ in drawn], dtype=np.int64)
    right = left + np.array([life for _, life, _ in drawn], dtype=np.int64)
    size = np.array([size for _, _, size in drawn], dtype=np.int64)
    y = first_fit(left, right, size)
    for one in range(len(drawn)):
        for other in range(one):
            meet = left[one] < right[other] and left[other] < right[one]
            assert not meet or y[one] + size[one] <= y[other] or y[other] + size[other] <= y[one]


def test_last_use_begins_the_waste() -> None:
    """A storage is idle after its last use; one that is live at the end may be used later."""
    lives = _lives(_trace(_tables()))
    assert lives.last_use.tolist() == [7, 1, 3, 5, 7]
    assert lives.right.tolist() == [8, 3, 4, 7, 8]
    assert lives.idle.tolist() == [8, 2, 4, 6, 8]


def test_unused_for_a_whole_step_is_waste() -> None:
    """What is alive at the end and was not used in the whole last step is idle since its last use."""
    storages = [Storage("w", 8, "parameter"), Storage("leak", 8)]
    steps = [[Op(makes=["leak"], reads=["w"])], [Op(reads=["w"])], [Op(reads=["w"])]]
    lives = _lives(_trace(make_tables(steps, storages)))
    assert lives.idle.tolist() == [3, 1]


def test_wasters_are_listed_by_bytes_times_operators() -> None:
    """The list contains storages held after their last use within the range, the largest first."""
    lives = _lives(_trace(_tables()))
    idle = find_idle(cut_stretch(lives, 0, 8))
    assert (idle.rows.tolist(), idle.held.tolist(), idle.waste.tolist()) == ([1, 3], [1, 1], [30, 30])
    # The weight for 8 operators, twice 30 bytes for 3 and 50 for 3.
    assert idle.share == pytest.approx(60 / (100 * 8 + 2 * 30 * 3 + 2 * 50 * 3))
    assert find_idle(cut_stretch(lives, 3, 6)).rows.tolist() == []


def test_recording_without_uses_cannot_tell() -> None:
    """Without recorded uses the table says so instead of listing everything as idle."""
    rank = _rank({**_tables(), Uses: Uses.empty()})
    lives = StorageLives(rank.trace, rank.history)
    idle = find_idle(cut_stretch(lives, 0, 8))
    assert not len(idle.rows)
    assert "idle tensors cannot be identified" in _text(waste_table(rank, lives, idle, "row"))


def test_largest_blocks_are_chosen() -> None:
    """Of more blocks than are drawn the largest by bytes times visible life are, and the sentence says how much."""
    lives = _lives(_trace(_tables()))
    chosen = choose_blocks(cut_stretch(lives, 0, 4), most=2)
    assert (chosen.rows.tolist(), chosen.alive) == ([0, 2], 3)
    assert chosen.share == pytest.approx((400 + 150) / (400 + 150 + 90))
    assert "The 2 largest of 3 blocks live in this range are drawn (85.9% of their" in drawn_sentence(chosen, "")
    zoomed = choose_blocks(cut_stretch(lives, 0, 1), most=2)
    assert zoomed.rows.tolist() == [0, 1]
    assert drawn_sentence(zoomed, "") == "All 2 blocks live in this range are drawn."


def test_heights_are_addresses_where_told() -> None:
    """Blocks are at their addresses, above those without one, with a note; without addresses all are packed."""
    chosen = choose_blocks(cut_stretch(_lives(_trace(_tables())), 0, 4))
    y = dict(zip(chosen.rows.tolist(), chosen.y.tolist(), strict=True))
    assert y[0] == 0
    assert y[1] == chosen.floor == 102
    assert y[2] == 102 + 30 + 1  # of the gap of 0xfe2 bytes one is left: a quarter of the smallest huge one, 4
    assert "addresses; gaps larger than 4 B are cut out; blocks allocated before recording" in placed_sentence(chosen)
    untold = choose_blocks(cut_stretch(_lives(_trace(_untold())), 0, 4))
    assert dict(zip(untold.rows.tolist(), untold.y.tolist(), strict=True)) == {0: 0, 1: 100, 2: 130}
    assert "heights are packed" in placed_sentence(untold)


def test_figure_draws_each_category_and_the_idle_part() -> None:
    """Each category is a trace of bars from birth to death, and one trace covers what is held after its last use."""
    rank = _rank(_untold())
    lives = StorageLives(rank.trace, rank.history)
    drawn = _rectangles(rank, lives, choose_blocks(cut_stretch(lives, 0, 4)))
    figure = blocks(drawn, 0, 4, 1, LIGHT, storage=1)
    parameters, activations, idle = figure.data
    assert (parameters.name, activations.name) == ("parameters", "activations")
    assert list(activations.customdata) == [2, 1]
    assert np.asarray(activations.base).tolist() == [1, 0]
    assert np.asarray(activations.x).tolist() == [3, 3]
    assert (np.asarray(idle.base).tolist(), np.asarray(idle.x).tolist()) == ([2], [1])
    assert np.asarray(idle.y).tolist() == [115]
    assert list(figure.layout.xaxis.range) == [0, 4]
    frame = figure.layout.shapes[1]
    assert (frame.x0, frame.x1, frame.y0, frame.y1, frame.line.width) == (0, 3, 100, 130, 3)
    assert activations.text[1] == "30 B, fc, aten.relu"


def test_names_are_no_markup() -> None:
    """Names of a recording cannot bring markup into the hover."""
    tables = make_tables([[Op("<script>", makes=["a"])]], [Storage("a", 64, name="<b>", category="<i>")])
    rank = _rank(tables)
    lives = StorageLives(rank.trace, rank.history)
    figure = blocks(_rectangles(rank, lives, choose_blocks(cut_stretch(lives, 0, 1))), 0, 1, 0, LIGHT)
    assert figure.data[0].name == "&lt;i&gt;"
    assert figure.data[0].text[0] == "64 B, &lt;b&gt;, &lt;script&gt;"
    assert "<i>" not in figure.data[0].hovertemplate


def test_nothing_alive_is_a_sentence() -> None:
    """A range without live storages shows a message."""
    rank = _rank(make_tables([[Op()]], []))
    lives = StorageLives(rank.trace, rank.history)
    figure = blocks(_rectangles(rank, lives, choose_blocks(cut_stretch(lives, 0, 1))), 0, 1, 0, LIGHT)
    assert "No storage is live" in figure.layout.annotations[0].text


def test_life_is_told() -> None:
    """The line on a storage has its allocation, its last use, its free and how long it is held in between."""
    lives = _lives(_trace(_tables()))
    assert life_sentence(lives, 1) == (
        "allocated at operator 0, last used at 1, freed after 2: held for 1 operators after its last use"
    )
    assert life_sentence(lives, 0) == "allocated before recording, last used at 7, not freed"


def test_click_chooses_the_storage() -> None:
    """A click chooses the storage, and takes the cursor to its birth where it is not alive at the cursor."""
    rank = _rank(_tables())
    assert _clicked({"points": [{"customdata": 3}]}) == 3
    assert [_clicked(click) for click in (None, {}, {"points": []}, {"points": [{"customdata": "3"}]})] == [NONE] * 4
    assert _jump(rank, View(first=0, end=8, at=5), 3) == {"storage": 3}
    assert _jump(rank, View(first=0, end=8, at=0), 3) == {"storage": 3, "at": 4}


def test_search_draws_what_is_found() -> None:
    """While something is searched for, only what has it in its name is drawn."""
    trace = _trace(_tables())
    page, workspace = BlocksPage(), Workspace([Source(trace.path, "made by hand", trace)])
    remark, _, _ = page._texts(workspace, View(tab="blocks", first=0, end=8, find="relu"))
    assert "All 2 blocks matching 'relu' are drawn." in _text(remark)


def test_empty_recording_says_so() -> None:
    """A recording without operators shows a message instead of a figure."""
    trace = _trace({Steps: Steps.empty()})
    page, workspace = BlocksPage(), Workspace([Source(trace.path, "empty", trace)])
    assert "No operators were recorded" in page._figure(workspace, View(), -1, -1, "light").layout.annotations[0].text
    assert "Nothing recorded" in _text(page._texts(workspace, View())[0])


@pytest.fixture(scope="module")
def large() -> Rank:
    """Half a million storages in as many operators, a few operators each, with long names and no addresses."""
    count = 500_000
    random = np.random.default_rng(0)
    created = np.arange(count)
    return _rank(
        {
            Steps: Steps.of(step=[0], kind=["recorded"], first_op_id=[0], last_op_id=[count - 1], is_complete=[True]),
            Ops: Ops.of(
                op_id=created,
                phase=np.full(count, "forward", dtype=object),
                name=np.array([f"<{number}>" + 80 * "&" for number in range(50)], dtype=object)[created % 50],
                module_id=np.full(count, NONE),
            ),
            Storages: Storages.of(
                storage_id=created,
                category=np.array(["activation", "gradient", "temporary"], dtype=object)[created % 3],
                module_id=np.full(count, NONE),
                allocated_bytes=random.integers(1, 2**24, count),
                requested_bytes=np.ones(count, dtype=np.int64),
                created_op_id=created,
                freed_op_id=np.minimum(created + random.integers(0, 1000, count), count - 1),
            ),
            Uses: Uses.of(op_id=created, storage_id=created),
        }
    )


def test_half_a_million_storages_are_few_and_small(large: Rank) -> None:
    """Of half a million storages no more blocks are placed than can be seen, and they travel in less than 150 kB."""
    lives = StorageLives(large.trace, large.history)
    chosen = choose_blocks(cut_stretch(lives, 0, 500_000))
    assert (len(chosen.rows), chosen.alive) == (MOST_BLOCKS, 500_000)
    figure = blocks(_rectangles(large, lives, chosen), 0, 500_000, 0, LIGHT)
    assert sum(len(trace.x) for trace in figure.data[:-1]) == MOST_BLOCKS
    assert len(figure.to_json()) < 150_000


def test_box_of_a_block_that_is_not_drawn_is_none() -> None:
    """A storage that is not drawn has no frame."""
    none = np.empty(0, dtype=np.int64)
    assert Rectangles(none, none, none, none, none, none, [], [], 0, 0).box(3) is None


def test_addresses_do_not_depend_on_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matching a recording part by part, as large ones are, finds the same addresses."""
    trace = Trace.open(SAMPLES / "gpt" / "run.memprof")
    whole = addresses_of(trace)
    monkeypatch.setattr(placement, "_MOST_MATCHED", 7)
    assert np.array_equal(addresses_of(trace), whole)
