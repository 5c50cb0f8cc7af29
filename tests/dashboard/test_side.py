"""The panel at the cursor: like storages grouped, and boxes of code, on moments small enough to work out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("dash")

from memprof.analysis.report.module_tree import folded_tree
from memprof.errors import UsageError
from memprof.trace.store import Trace
from memprof.units import format_bytes
from memprof_dashboard.editors import EDITORS, address_of_editor
from memprof_dashboard.figures.boxes import flame, is_found, treemap
from memprof_dashboard.palette import THEMES
from memprof_dashboard.side.detail import link_to, source_text
from memprof_dashboard.side.panel import _above, grouped
from memprof_dashboard.side.table import CHUNK, Order, chunk_of, table_of
from memprof_dashboard.sources import Rank
from memprof_dashboard.state import View
from memprof_dashboard.views.code_boxes import boxes_by_code
from memprof_dashboard.views.groups import BEFORE, Group, group_alike, storages_found
from tests.building import Module, Op, Storage, make_trace

SAMPLES = Path(__file__).parents[2] / "sample_traces"
FRAMES = ("train.py:7:inner", "train.py:3:main")


@pytest.fixture(scope="module")
def rank() -> Rank:
    """Five like layers: each makes 8 bytes, all but the fourth are alive at the end; a weight was there before."""
    layers = [f"layers.{number}" for number in range(5)]
    ops = [
        Op("aten.mm.default", makes=[f"a{place}"], module=name, stack="\n".join(FRAMES))
        for place, name in enumerate(layers)
    ]
    ops[4] = Op("aten.mm.default", makes=["a4"], module="layers.4", stack="\n".join(FRAMES), frees=[])
    ops.insert(4, Op(frees=["a3"]))
    storages = [Storage(f"a{place}", 8, module=name, shape="2x1") for place, name in enumerate(layers)]
    modules = [Module("", "Net"), Module("layers", "ModuleList"), *(Module(name) for name in layers)]
    return Rank(make_trace([ops], [*storages, Storage("w", 100, "parameter", name="embedding.weight")], modules))


def _groups(rank: Rank, by: str) -> list[Group]:
    at = rank.history.ops - 1
    return group_alike(rank, folded_tree(rank.modules), rank.history.alive(at), by)


def test_like_storages_of_repeated_layers_share_a_row(rank: Rank) -> None:
    """Only the layers that are there stand in the name; the weight keeps its own."""
    weight, layers = _groups(rank, "module")
    assert (layers.title, layers.size, len(layers.rows)) == ("layers.0-2,4", 32, 4)
    assert layers.source is not None
    assert (layers.operator, layers.source.place) == ("aten.mm.default", "train.py:7")
    assert (weight.title, weight.size, weight.source) == ("embedding.weight", 100, None)


def test_lines_and_stacks_are_rows_too(rank: Rank) -> None:
    """By line the innermost of the user's code, by stack its frames, outermost first."""
    assert [group.title for group in _groups(rank, "line")] == [BEFORE, "train.py:7"]
    assert _groups(rank, "stack")[1].title == "train.py:3 main → train.py:7 inner"


@pytest.mark.parametrize("by", ["module", "line", "stack"])
@pytest.mark.parametrize("sample", ["gpt", "resnet", "lstm"])
def test_groups_are_a_partition(sample: str, by: str) -> None:
    """At any moment each live storage is in exactly one group, whose category it has."""
    rank = Rank(Trace.open(SAMPLES / sample / "run.memprof"))
    history, tree = rank.history, folded_tree(rank.modules)
    for at in np.linspace(0, history.ops - 1, 5).astype(int).tolist():
        rows = history.alive(at)
        groups = group_alike(rank, tree, rows, by)
        assert np.array_equal(np.sort(np.concatenate([group.rows for group in groups])), rows)
        assert [group.size for group in groups] == sorted((group.size for group in groups), reverse=True)
        for group in groups:
            assert int(history.size[group.rows].sum()) == group.size
            codes = set(history.category[group.rows].tolist())
            assert [history.storage_categories[code] for code in codes] == [group.category]


def test_boxes_of_code_nest_frames_and_lines(rank: Rank) -> None:
    """By stack: frames, then the operator; by line: file, line, operator."""
    at = rank.history.ops - 1
    by_stack = {box.label: box.size for box in boxes_by_code(rank, at, by_stack=True)}
    sizes = {"train.py:3 main": 32, "train.py:7 inner": 32, "aten.mm.default": 32}
    assert by_stack == {"live bytes": 132, BEFORE: 100, **sizes}
    by_line = {box.label: box.size for box in boxes_by_code(rank, at, by_stack=False)}
    assert by_line == {"live bytes": 132, BEFORE: 100, "train.py": 32, "train.py:7": 32, "aten.mm.default": 32}


@pytest.mark.parametrize("by_stack", [False, True])
@pytest.mark.parametrize("sample", ["gpt", "resnet", "lstm"])
def test_boxes_of_code_hold_what_is_alive(sample: str, *, by_stack: bool) -> None:
    """The outermost box is the total, and no box is larger than the one around it."""
    rank = Rank(Trace.open(SAMPLES / sample / "run.memprof"))
    history = rank.history
    for at in np.linspace(0, history.ops - 1, 7).astype(int).tolist():
        boxes = boxes_by_code(rank, at, by_stack=by_stack)
        assert boxes[0].size == int(history.size[history.alive(at)].sum()) + max(history.workspace(at), 0)
        inside = np.zeros(len(boxes), dtype=np.int64)
        for box in boxes[1:]:
            inside[box.parent] += box.size
        assert (inside <= [box.size for box in boxes]).all()


def test_inverted_stacks_have_operators_outside(rank: Rank) -> None:
    """The same bytes; what is next to the outermost box are operators, and callers are inside."""
    at = rank.history.ops - 1
    plain, inverted = (boxes_by_code(rank, at, by_stack=True, is_inverted=turned) for turned in (False, True))
    assert inverted[0].size == plain[0].size
    assert {box.label for box in plain if box.parent == 0} != {box.label for box in inverted if box.parent == 0}
    view = View(side="flame", by="stack", inverted=1, find="inner")
    button, share = _above(rank, at, view)
    assert json.loads(getattr(button, "data-go")) == {"inverted": 0}
    found = storages_found(rank, "inner")
    assert found is not None
    rows = rank.history.alive(at)
    size = int(rank.history.size[rows[found[rows]]].sum())
    assert share.children == f"{format_bytes(size)} match, {size / int(rank.history.total[at]):.1%}"


def test_pictures_mark_what_is_searched_for(rank: Rank) -> None:
    """The frame of a found box is wide; hover and labels are text."""
    boxes = boxes_by_code(rank, rank.history.ops - 1, by_stack=True)
    for draw in (flame, treemap):
        (trace,) = draw(boxes, THEMES["light"], "inner").data
        wide = [label for label, width in zip(trace.labels, trace.marker.line.width, strict=True) if width > 1]
        assert len(wide) == 1
        assert "train.py:7 inner" in wide[0]
    assert not is_found(boxes[0], "")


def test_source_lines_are_read_only_from_python_files_that_are_here(tmp_path: Path) -> None:
    """A recording may come from anybody: what it names is not opened unless it is a plain .py file."""
    (tmp_path / "train.py").write_text("first\n  loss = 1  \n")
    (tmp_path / "secret").write_text("one\ntwo\n")
    (tmp_path / "folder.py").mkdir()
    assert source_text(str(tmp_path / "train.py"), 2) == "loss = 1"
    for name in ("secret", "folder.py", "missing.py"):
        assert source_text(str(tmp_path / name), 2) == ""
    assert source_text("train.py", 2) == ""
    assert source_text(f"/{tmp_path}/train.py", 2) == ""  # a network path on Windows


def test_editor_links_name_only_files_that_are_here(tmp_path: Path) -> None:
    """The name is quoted, whatever it contains; no link to what is not a Python file on this machine."""
    (tmp_path / "my #1.py").write_text("x = 1\n")
    (tmp_path / "secret").write_text("one\n")
    link = link_to(EDITORS["vscode"], str(tmp_path / "my #1.py"), 1)
    assert link == f"vscode://file{tmp_path}/my%20%231.py:1"
    assert link_to(EDITORS["none"], str(tmp_path / "my #1.py"), 1) == ""
    assert link_to(EDITORS["vscode"], str(tmp_path / "secret"), 1) == ""
    assert link_to(EDITORS["vscode"], "train.py", 1) == ""


def test_editors_have_names_or_addresses() -> None:
    """A name of the list, or an address that takes a file; everything else is an error that lists the names."""
    assert address_of_editor("cursor") == "cursor://file{file}:{line}"
    assert address_of_editor("emacs://open?{file}") == "emacs://open?{file}"
    for name in ("vim", "javascript:alert(1)", "https://example.org"):
        with pytest.raises(UsageError, match=r"unknown editor .*vscode, vscode-insiders"):
            address_of_editor(name)


def test_table_comes_in_chunks() -> None:
    """The chunks follow each other without a gap, in any order of rows, and the last one says that it is."""
    count = 2 * CHUNK + 10
    storages = [Storage(f"s{number:03}", 8 * (number + 1), name=f"w{number:03}") for number in range(count)]
    rank = Rank(make_trace([[Op(makes=[storage.key for storage in storages])]], storages))
    for order, first, last in (
        (Order(), f"w{count - 1}", "w000"),
        (Order(0, is_up=True), "w000", f"w{count - 1}"),
        (Order(1), f"w{count - 1}", "w000"),
    ):
        chunks = [chunk_of(rank, View(), start, order) for start in range(0, count, CHUNK)]
        assert [chunk["more"] for chunk in chunks] == [True, True, False]
        names = [row[2][1][2][1][2][0] for chunk in chunks for row in chunk["rows"]]
        assert (len(names), names[0], names[-1]) == (count, first, last)
    assert chunk_of(rank, View(find="w00"), 0, Order())["key"] != chunks[0]["key"]
    assert getattr(table_of(rank, View())[0], "data-more") == "yes"


def test_imported_recordings_have_no_empty_columns() -> None:
    """Without modules and stacks there is nothing to group by but the category, and no column of sources."""
    rank = Rank(make_trace([[Op(makes=["a"])]], [Storage("a", 8)]))
    assert (rank.has_modules, rank.has_stacks, rank.has_phases) == (False, False, True)
    assert list(grouped(rank)) == ["category"]
    heads = json.loads(getattr(table_of(rank, View())[0], "data-drawn"))[2][0][2][0][2]
    assert [head[2][0] for head in heads] == ["size", "allocated by", "count"]
