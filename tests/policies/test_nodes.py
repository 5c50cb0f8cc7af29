"""When the nodes of autograd's graph run in backward, by hand."""

from __future__ import annotations

import pytest

from memprof.policies.checkpoint.nodes import find_nodes
from memprof.trace.schema import NONE
from tests.building import Op, make_step


def moments(*backward: str) -> tuple[int, ...]:
    """Returns first, returned, released and last of the node that runs these operators after two of forward.

    Operators are counted from the node's first one.
    """
    names = ("aten.mul.Tensor", "aten.mm.default")
    ops = [*map(Op, names), *(Op(f"aten.{name}", "backward", forward=0) for name in backward)]
    found = find_nodes(make_step(ops, []))
    assert all(values[1] == NONE for values in (found.first, found.returned, found.released, found.last))
    return tuple(int(values[0]) - len(names) for values in (found.first, found.returned, found.released, found.last))


@pytest.mark.parametrize(
    ("backward", "expected"),
    [
        (["mul.Tensor"], (0, 0, 0, 0)),
        (["mul.Tensor", "mul.Tensor"], (0, 1, 1, 1)),
        # Sums of gradients run after the saved tensors are released.
        (["mul.Tensor", "add.Tensor"], (0, 0, 0, 1)),
        (["mul.Tensor", "mul.Tensor", "add_.Tensor", "add.Tensor"], (0, 1, 1, 3)),
        # A node that only adds is its own function.
        (["add.Tensor"], (0, 0, 0, 0)),
        # Reductions to a broadcast operand's size run after the function, and before the release.
        (["mul.Tensor", "sum.dim_IntList"], (0, 0, 1, 1)),
        (["mul.Tensor", "sum.dim_IntList", "view.default"], (0, 0, 2, 2)),
        (["mul.Tensor", "_to_copy.default", "add.Tensor"], (0, 0, 1, 2)),
        (["mul.Tensor", "sum.dim_IntList", "view.default", "sum.dim_IntList", "add_.Tensor"], (0, 0, 3, 4)),
        # A view without a reduction before it belongs to the function.
        (["mul.Tensor", "view.default"], (0, 1, 1, 1)),
        (["sum.dim_IntList", "view.default"], (0, 1, 1, 1)),
    ],
)
def test_moments_of_a_node(backward: list[str], expected: tuple[int, ...]) -> None:
    """First operator, last of its function, last before the release, last of all."""
    assert moments(*backward) == expected
