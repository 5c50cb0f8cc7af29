"""Names, stacks, tensors and modules by number."""

from __future__ import annotations

from typing import Any

import numpy as np

from memprof.trace.assemble.texts import look_up, module_table, stack_table, tensor_kinds
from memprof.trace.files.spool import Spool
from memprof.trace.schema import NONE


def spool(**records: list[Any]) -> Spool:
    """Makes a spool whose streams of texts each came in one batch."""
    return Spool(records={stream: [texts] for stream, texts in records.items()})


def names(*modules: tuple[int, str, str, int, int]) -> list[str]:
    """Names modules of (root, name below it, type, parent, bytes of own parameters)."""
    return list(module_table(spool(modules=[list(module) for module in modules])).name)


def test_texts_are_looked_up_by_number() -> None:
    """A number that points nowhere has an empty text."""
    assert list(look_up(["a", "b"], np.array([1, NONE, 0]))) == ["b", "", "a"]


def test_texts_of_several_batches_are_numbered_through() -> None:
    """Texts reach the disk as they are met, batch by batch."""
    kinds = tensor_kinds(Spool(records={"tensors": [[["2x3", "float32", "cpu"]], [["", "int64", "cpu"]]]}))
    assert kinds.shape == ["2x3", ""]
    assert kinds.dtype == ["float32", "int64"]


def test_tensors_alike_in_all_but_the_first_size_are_a_family() -> None:
    """A data set and its batches; not another type, another size behind, another count of sizes, or a scalar."""
    shapes = [["900x28", "float32"], ["64x28", "float32"], ["64x28", "int64"], ["64x29", "float32"]]
    shapes += [["64", "float32"], ["10", "float32"], ["", "float32"], ["64x28x1", "float32"]]
    families = tensor_kinds(spool(tensors=[[*shape, "cpu"] for shape in shapes])).families().tolist()
    assert families[0] == families[1]
    assert families[4] == families[5]
    assert len({families[0], families[2], families[3], families[4], families[6], families[7]}) == 6
    assert families[-1] == NONE  # that of no tensor


def test_the_one_model_keeps_its_own_names() -> None:
    """As in named_modules(): the root is "", its parts follow by their path."""
    table = module_table(
        spool(modules=[[0, "", "Net", -1, 0], [0, "body", "Sequential", 0, 0], [0, "body.0", "Linear", 1, 160]])
    )
    assert list(table.name) == ["", "body", "body.0"]
    assert list(table.type) == ["Net", "Sequential", "Linear"]
    assert table.parent_id.tolist() == [NONE, 0, 1]
    assert table.parameter_bytes.tolist() == [0, 0, 160]


def test_losses_beside_the_one_model_carry_their_type() -> None:
    """A module without parameters, such as a loss, is not a second model."""
    assert names((0, "", "Net", -1, 40), (0, "fc", "Linear", 0, 16), (1, "", "CrossEntropyLoss", -1, 0)) == [
        "",
        "fc",
        "CrossEntropyLoss",
    ]


def test_several_models_carry_their_types() -> None:
    """Roots of the same type are numbered, the first without a number."""
    modules = [(0, "", "Net", -1, 8), (0, "fc", "Linear", 0, 8), (1, "", "Net", -1, 8), (1, "fc", "Linear", 2, 8)]
    assert names(*modules, (2, "", "Critic", -1, 8)) == ["Net", "Net.fc", "Net#2", "Net#2.fc", "Critic"]


STACKS = [
    [-1, ["train.py:9:main", "train.py:20:<module>"]],
    [0, ["model.py:5:forward"]],
    [1, ["linear.py:3:forward"]],
    [0, ["model.py:5:forward"]],
    [-1, ["eval.py:1:<module>"]],
]


def test_stacks_are_spelled_out_with_their_outer_part() -> None:
    """A stack is a chain: its own frames, innermost first, then those of the call around it."""
    table, rows = stack_table(spool(stacks=STACKS), np.array([2, NONE, 0]))
    assert list(table.frames[rows[2]].split("\n")) == [
        "linear.py:3:forward",
        "model.py:5:forward",
        "train.py:9:main",
        "train.py:20:<module>",
    ]
    assert table.frames[rows[0]] == "train.py:9:main\ntrain.py:20:<module>"


def test_stacks_in_use_are_told_once() -> None:
    """Two numbers with the same frames are one stack; what no operator uses is left out; none is none."""
    table, rows = stack_table(spool(stacks=STACKS), np.array([1, 3, 1, NONE]))
    assert len(table) == 1
    assert rows[1] == rows[3] == 0
    assert rows[4] == rows[2] == NONE
    assert rows[NONE] == NONE


def test_a_very_deep_stack_is_spelled_out() -> None:
    """A chain of 5000 calls, as recursive modules make it, does not exhaust Python's own stack."""
    deep = [[number - 1, [f"tree.py:{number}:forward"]] for number in range(5000)]
    table, rows = stack_table(spool(stacks=deep), np.array([4999]))
    assert table.frames[rows[4999]].count("\n") == 4999
