"""The tree of modules, and the rows of it that fit a table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.analysis.report.breakdown import Breakdown, split_bytes
from memprof.analysis.report.module_tree import ModuleTree, folded_tree, module_tree
from memprof.analysis.report.table_rows import TreeRow, choose_rows
from memprof.errors import BadInputError
from memprof.trace.schema import NONE, Modules


def make_modules(types: dict[str, str]) -> Modules:
    """Makes modules of names and types; the parent is the name one dotted part shorter."""
    ids = {name: row for row, name in enumerate(types)}
    return Modules.of(
        module_id=range(len(types)),
        name=list(types),
        type=list(types.values()),
        parent_id=[ids[name.rpartition(".")[0]] if name else NONE for name in types],
    )


def gpt(layers: int) -> Modules:
    types = {"": "GPT", "embed": "Embedding", "layers": "ModuleList"}
    for layer in range(layers):
        types |= {f"layers.{layer}": "Block", f"layers.{layer}.norm": "LayerNorm", f"layers.{layer}.mlp": "MLP"}
    return make_modules(types)


def bytes_of(tree: ModuleTree, modules: Modules, amounts: dict[str, int]) -> Breakdown[int]:
    nodes = tree.nodes_of(np.array([list(modules.name).index(name) for name in amounts]))
    return split_bytes(nodes.tolist(), list(amounts.values()))


def shown(tree: ModuleTree, rows: tuple[TreeRow, ...]) -> list[tuple[int, str, int, int]]:
    def label(row: TreeRow) -> str:
        if row.node is not None:
            return tree.labels[row.node]
        return f"other {row.cut}" if row.cut else "outside"

    return [(row.depth, label(row), row.bytes, row.own_bytes) for row in rows]


def test_sums_hold_all_that_is_below() -> None:
    """The root has its own 1 byte, 10 of the embedding and 100 + 200 of the two layers' parts."""
    modules = gpt(1)
    tree = module_tree(modules)
    own = np.array([1, 10, 0, 0, 100, 200])
    assert tree.with_children(own).tolist() == [311, 10, 300, 300, 100, 200]


def test_sums_work_on_several_rows_at_once() -> None:
    """A row for each micro-batch is summed by itself."""
    tree = module_tree(gpt(1))
    own = np.array([[0, 0, 0, 0, 1, 2], [5, 0, 0, 0, 0, 4]])
    assert tree.with_children(own).tolist() == [[3, 0, 3, 3, 1, 2], [9, 0, 4, 4, 0, 4]]


def test_the_common_ancestor_holds_both() -> None:
    """Of two parts of a layer the layer, of two layers the list, of a module and nothing nothing."""
    modules = gpt(2)
    tree = module_tree(modules)
    ids = {name: row for row, name in enumerate(modules.name)}
    pairs = [
        ("layers.0.norm", "layers.0.mlp", "layers.0"),
        ("layers.0.mlp", "layers.1.mlp", "layers"),
        ("layers.0.mlp", "layers.0", "layers.0"),
        ("embed", "layers.1.norm", ""),
        ("embed", "embed", "embed"),
    ]
    left, right, expected = (np.array([ids[pair[place]] for pair in pairs]) for place in range(3))
    assert tree.common_ancestors(left, right).tolist() == expected.tolist()
    assert tree.common_ancestors(np.array([0, NONE]), np.array([NONE, NONE])).tolist() == [NONE, NONE]


def test_two_models_have_nothing_in_common() -> None:
    """With several models the roots' types come first, and no module holds both."""
    modules = Modules.of(
        module_id=[0, 1, 2, 3],
        name=["Generator", "Generator.net", "Critic", "Critic.net"],
        type=["Generator", "Linear", "Critic", "Linear"],
        parent_id=[NONE, 0, NONE, 2],
    )
    tree = module_tree(modules)
    assert tree.labels == ("Generator", "net", "Critic", "net")
    assert tree.common_ancestors(np.array([1]), np.array([3])).tolist() == [NONE]


def test_like_layers_are_folded() -> None:
    """Three layers and what is in them share nodes; two do not."""
    folded = folded_tree(gpt(3))
    assert folded.names == ("", "embed", "layers", "layers.*", "layers.*.norm", "layers.*.mlp")
    assert folded.counts.tolist() == [1, 1, 1, 3, 3, 3]
    assert folded.node_of_module.tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5]
    assert folded.title(0) == "GPT"
    assert len(folded_tree(gpt(2))) == len(gpt(2))


def test_layers_of_different_types_stay_apart() -> None:
    """In a Sequential of three Linears and a ReLU only the Linears are folded."""
    tree = folded_tree(make_modules({"": "Sequential", "0": "Linear", "1": "ReLU", "2": "Linear", "3": "Linear"}))
    assert list(zip(tree.names, tree.types, tree.counts.tolist(), strict=True)) == [
        ("", "Sequential", 1),
        ("*", "Linear", 3),
        ("1", "ReLU", 1),
    ]


def test_modules_that_hold_one_another_are_refused() -> None:
    """A damaged table results in an error message, not in an endless loop."""
    modules = Modules.of(module_id=[0, 1], name=["a", "b"], type=["A", "B"], parent_id=[1, 0])
    with pytest.raises(BadInputError, match="cycle"):
        module_tree(modules)


def test_a_trace_without_modules_has_an_empty_tree() -> None:
    """Bytes outside any module are the only row."""
    tree = folded_tree(Modules.empty())
    assert choose_rows(split_bytes([None], [5]), tree, 10) == (TreeRow(None, 0, 5, 5),)


def test_rows_go_where_the_bytes_are() -> None:
    """With room for all, every module that holds something has its row, the largest of each level first."""
    modules = gpt(2)
    tree = module_tree(modules)
    split = bytes_of(tree, modules, {"": 1, "layers.0.norm": 5, "layers.0.mlp": 20, "layers.1.mlp": 30})
    assert shown(tree, choose_rows(split, tree, 20)) == [
        (0, "GPT", 56, 1),
        (1, "layers", 55, 0),
        (2, "1", 30, 0),
        (3, "mlp", 30, 30),
        (2, "0", 25, 0),
        (3, "mlp", 20, 20),
        (3, "norm", 5, 5),
    ]


def test_siblings_that_do_not_fit_are_summed() -> None:
    """Four rows: the root, the list, its fuller layer, and the other one as a sum; outside has a fifth."""
    modules = gpt(3)
    tree = module_tree(modules)
    split = split_bytes([None, 4, 7, 10], [9, 5, 20, 30])
    assert shown(tree, choose_rows(split, tree, 5)) == [
        (0, "GPT", 55, 0),
        (1, "layers", 55, 0),
        (2, "2", 30, 0),
        (2, "other 2", 25, 0),
        (0, "outside", 9, 9),
    ]


@given(st.lists(st.integers(0, 100), min_size=13, max_size=13), st.integers(1, 20))
def test_an_opened_row_is_the_sum_of_the_rows_below_it(own: list[int], limit: int) -> None:
    """For random bytes and any room: own bytes and the rows right below sum to a row's bytes; the limit holds."""
    modules = make_modules(
        {"": "N", "a": "A", "b": "B", **{f"{letter}.{number}": "L" for letter in "ab" for number in range(5)}}
    )
    tree = module_tree(modules)
    rows = choose_rows(split_bytes(list(range(13)), own), tree, limit)
    assert len(rows) <= limit
    assert sum(row.bytes for row in rows if row.depth == 0) == sum(own)
    for place, row in enumerate(rows):
        below = []
        for later in rows[place + 1 :]:
            if later.depth <= row.depth:
                break
            below.append(later)
        children = [one.bytes for one in below if one.depth == row.depth + 1]
        if children:
            assert row.own_bytes + sum(children) == row.bytes
