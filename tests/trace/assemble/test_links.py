"""Backward operators find their forward operators, and what was kept between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memprof.trace.assemble.links import forward_of, saved_for_backward
from memprof.trace.schema import NONE, Ops, Saved, Storages, Uses


def linked(*operators: tuple[int, int], names: dict[int, str] | None = None) -> list[int]:
    """Links operators of (autograd's counter, number of the backward node), some with a name (``*_`` is in place)."""
    sequence, node = np.array(operators, dtype=np.int64).reshape(-1, 2).T
    named = np.array([(names or {}).get(row, "aten.mul.Tensor") for row in range(len(operators))], dtype=np.object_)
    mutates = np.array([name.split(".")[1].endswith("_") for name in named], dtype=np.bool_)
    return forward_of(sequence, node, named, mutates).tolist()


def test_a_backward_operator_is_linked_to_the_operator_that_made_its_node() -> None:
    """Node k is made just before the first operator that runs while the counter stands at k + 1."""
    # Nodes 7 and 8 are made; the operator between (a detach) makes none. Backward runs 8, then 7 in two operators.
    assert linked((8, -1), (8, -1), (9, -1), (9, 8), (9, 7), (9, 7)) == [NONE, NONE, NONE, 2, 0, 0]


def test_operators_outside_nodes_are_not_linked() -> None:
    """Neither what runs outside backward (-1), nor the accumulation of a gradient (-2)."""
    assert linked((1, -1), (1, -2), (1, -1)) == [NONE] * 3


def test_a_node_from_before_the_recording_is_not_linked() -> None:
    """Its forward operator was not seen; a later operator with its number is not its forward operator."""
    assert linked((20, -1), (20, 3)) == [NONE, NONE]
    assert linked((20, 20), (21, -1)) == [NONE, NONE]


def test_a_node_made_in_backward_is_linked_too() -> None:
    """Double backward: the first backward, run with create_graph, makes node 5 that the second runs."""
    # Operator 0 makes node 4; backward of 4 (operator 1) makes node 5; operator 2 is the backward of 5.
    assert linked((5, -1), (6, 4), (6, 5)) == [NONE, 0, 1]


def test_an_operator_in_place_is_linked_through_the_clone_of_what_it_overwrites() -> None:
    """hardswish_ makes node 4 and clones its input, which makes node 5; both run while the counter stands at 6."""
    names = {0: "aten.clone.default", 1: "aten.hardswish_.default"}
    assert linked((6, -1), (6, -1), (6, 4), names=names) == [NONE, NONE, 0]
    # Without the clone nobody knows whose node it is.
    assert linked((6, -1), (6, -1), (6, 4)) == [NONE, NONE, NONE]


def test_the_node_of_a_changed_view_is_linked_to_the_operator_that_changed_it() -> None:
    """relu_ makes node 4, and, once it has run, node 5 for the base: that one begins with the base's gradient."""
    names = {0: "aten.relu_.default", 3: "aten.new_empty_strided.default"}
    assert linked((5, -1), (7, -1), (7, 6), (7, 5), (7, 5), names=names) == [NONE, NONE, 1, 0, 0]
    # An operator without a node may run right after it: it has nothing to do with the base.
    assert linked((5, -1), (6, -1), (7, -1), (7, 5), names=names) == [NONE, NONE, NONE, 0]


def saved(
    operators: list[dict[str, Any]],
    created: list[int],
    uses: list[tuple[int, int, str]],
    freed: dict[int, int] | None = None,
) -> list[tuple[int, int, int, int]]:
    """Lists what is saved as (storage, forward operator, module, last reader).

    Args:
        operators: Each with phase (forward by default), its forward operator, its name and whether it repeats.
        created: Operator that makes each storage, NONE for older ones.
        uses: (operator, storage, role).
        freed: Operators after which storages are freed.
    """
    count = len(operators)
    ops = Ops.of(
        op_id=np.arange(count),
        name=[op.get("name", "aten.mul.Tensor") for op in operators],
        phase=[op.get("phase", "forward") for op in operators],
        module_id=[10 + number for number in range(count)],
        forward_op_id=[op.get("forward", NONE) for op in operators],
        is_recompute=[op.get("repeats", False) for op in operators],
    )
    ends = [(freed or {}).get(storage, NONE) for storage in range(len(created))]
    storages = Storages.of(storage_id=np.arange(len(created)), created_op_id=created, freed_op_id=ends)
    table = Uses.of(op_id=[u[0] for u in uses], storage_id=[u[1] for u in uses], role=[u[2] for u in uses])
    found = saved_for_backward(table, storages, ops, np.array([op.get("inside", False) for op in operators]))
    assert isinstance(found, Saved)
    columns = (found.storage_id, found.forward_op_id, found.module_id, found.released_op_id)
    return list(zip(*(column.tolist() for column in columns), strict=True))


FORWARD: dict[str, Any] = {}


def backward(of: int) -> dict[str, Any]:
    return {"phase": "backward", "forward": of}


def test_what_backward_reads_was_saved_by_its_forward_operator() -> None:
    """y = f(x), z = g(y): the backward of g reads y, so g saved it; it is released there."""
    operators = [FORWARD, FORWARD, backward(1), backward(0)]
    uses = [(0, 0, "read"), (0, 1, "write"), (1, 1, "read"), (1, 2, "write"), (2, 1, "read"), (2, 3, "write")]
    assert saved(operators, [NONE, 0, 1, 2], uses) == [(1, 1, 11, 2)]


def test_an_operators_own_result_can_be_saved() -> None:
    """Sigmoid's backward reads what sigmoid made."""
    assert saved([FORWARD, backward(0)], [0], [(0, 0, "write"), (1, 0, "read")]) == [(0, 0, 10, 1)]


def test_what_is_made_in_backward_was_not_saved() -> None:
    """Neither the gradient that flows into a node, nor a temporary between two operators of one node."""
    operators = [FORWARD, backward(0), backward(0)]
    assert saved(operators, [NONE, 1], [(0, 0, "read"), (1, 1, "write"), (2, 1, "read")]) == []


def test_what_is_saved_is_released_by_its_last_reader() -> None:
    """Two operators of one node read it; one that changes it in place reads it too, one that writes it does not."""
    operators = [FORWARD, backward(0), backward(0), backward(0)]
    uses = [(0, 0, "read"), (1, 0, "read"), (2, 0, "mutate"), (3, 0, "write")]
    assert saved(operators, [NONE], uses) == [(0, 0, 10, 2)]


def test_what_two_operators_save_is_told_for_each() -> None:
    """x is kept by both operators that read it, each until its own backward."""
    operators = [FORWARD, FORWARD, backward(1), backward(0)]
    uses = [(0, 0, "read"), (1, 0, "read"), (2, 0, "read"), (3, 0, "read")]
    assert sorted(saved(operators, [NONE], uses)) == [(0, 0, 10, 3), (0, 1, 11, 2)]


@pytest.mark.parametrize("name", ["aten.gather.default", "aten._fft_r2c.default"])
@pytest.mark.parametrize(("freed", "released"), [(2, [2]), (3, [3]), (4, [3]), (NONE, [3]), (0, [])])
def test_what_is_saved_for_its_shape_is_released_with_its_node(freed: int, released: list[int], name: str) -> None:
    """Backward reads the index alone. Where the input is freed in forward, a checkpoint saved nothing."""
    operators = [{"name": name}, FORWARD, backward(0), backward(0), backward(1)]
    uses = [(0, 0, "read"), (0, 1, "read"), (0, 2, "write"), (2, 3, "write"), (3, 1, "read"), (3, 3, "mutate")]
    found = saved(operators, [NONE, NONE, 0, 2], uses, {0: freed})
    assert found == [*((0, 0, 10, op) for op in released), (1, 0, 10, 3)]


def test_a_checkpoints_input_is_saved_by_its_first_reader() -> None:
    """x, made in forward, is read again by the repetition inside backward: its first reader kept it, until then.

    What the repetition makes for a node is saved by the repeated operator.
    """
    repeat = {"phase": "backward", "repeats": True}
    operators = [FORWARD, FORWARD, FORWARD, repeat, backward(3)]
    uses = [(0, 0, "write"), (1, 0, "read"), (1, 1, "write"), (2, 0, "read")]
    uses += [(3, 0, "read"), (3, 2, "write"), (4, 2, "read")]
    assert saved(operators, [0, 1, 3], uses) == [(0, 1, 11, 3), (2, 3, 13, 4)]


def test_a_later_micro_batch_saves_nothing_for_a_repetition_before_it() -> None:
    """As in an interleaved pipeline: the first reader since the change in place runs after the repetition."""
    again = {"phase": "backward", "repeats": True}
    uses = [(0, 0, "read"), (1, 0, "mutate"), (2, 0, "read"), (3, 0, "read")]
    assert saved([FORWARD, FORWARD, again, FORWARD], [NONE], uses) == []


def test_memory_first_read_in_the_repetition_was_not_saved() -> None:
    """Random numbers drawn inside the repetition were not there in forward."""
    repeat = {"phase": "backward", "repeats": True}
    assert saved([FORWARD, repeat, repeat], [1], [(1, 0, "write"), (2, 0, "read")]) == []


def test_what_a_compiled_region_saves_is_told_by_the_operator_that_made_it() -> None:
    """One node for two operators and another for a third; the older input belongs to its first reader in each."""
    inside = {"inside": True}
    operators = [inside, inside, inside, backward(2) | inside, backward(0) | inside, backward(0) | inside]
    uses = [(0, 1, "write"), (1, 0, "read"), (1, 1, "read"), (1, 2, "write"), (2, 2, "read"), (2, 0, "read")]
    uses += [(3, 0, "read"), (3, 2, "read"), (4, 1, "read"), (4, 2, "read"), (4, 3, "write"), (5, 0, "read")]
    uses += [(5, 3, "read")]
    found = saved(operators, [NONE, 0, 1, 4], uses)
    assert sorted(found) == [(0, 1, 11, 5), (0, 2, 12, 3), (1, 0, 10, 4), (2, 1, 11, 4), (2, 2, 12, 3)]
