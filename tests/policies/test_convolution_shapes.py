"""The shapes of convolutions, as a recording has them: of the first tensor on each storage."""

from __future__ import annotations

import numpy as np
import pytest

from memprof.policies.precision.convolutions import depthwise_ops, shapes_of, unfolded_bytes
from tests.building import Op, Storage, make_step


def found(weight: str, given: str, made: str, *others: Storage) -> tuple[list[int], list[int], list[int]] | None:
    """Returns the shapes of a convolution of a step, from those of its storages."""
    step = make_step(
        [
            Op(makes=["x"]),
            Op("aten.convolution.default", reads=["x", "weight", *(one.key for one in others)], makes=["y"]),
        ],
        [
            Storage("x", 64, shape=given),
            Storage("weight", 64, "parameter", shape=weight),
            Storage("y", 64, shape=made),
            *others,
        ],
    )
    rows = slice(*np.searchsorted(step.uses.op_id, [1, 2]))
    return shapes_of(step, rows)


@pytest.mark.parametrize(
    ("weight", "given", "made", "expected"),
    [
        # As they are; a bias and other parameters do not count.
        ("8x3x3x3", "2x3x10x10", "2x8x10x10", ([8, 3, 3, 3], [2, 3, 10, 10], [2, 8, 10, 10])),
        # The output was seen flat first: 2 x 8 channels of 100 values.
        ("8x3x3x3", "2x3x10x10", "2x800", ([8, 3, 3, 3], [2, 3, 10, 10], [2, 8, 10, 10])),
        # The input was: 2 x 3 channels.
        ("8x3x3x3", "2x300", "2x8x10x10", ([8, 3, 3, 3], [2, 3, 10, 10], [2, 8, 10, 10])),
        # Depthwise, one weight channel for each input channel: the input has as many as the weight has rows.
        ("8x1x3x3", "2x800", "2x8x10x10", ([8, 1, 3, 3], [2, 8, 10, 10], [2, 8, 10, 10])),
        # A flat output of another size is not this image's: it is not known.
        ("8x3x3x3", "2x3x10x10", "2x128", None),
        ("8x3x3x3", "300", "2x8x10x10", None),
        # In one dimension.
        ("8x3x3", "2x3x10", "2x8x10", ([8, 3, 3], [2, 3, 10], [2, 8, 10])),
    ],
)
def test_shapes_of_weight_input_and_output(
    weight: str, given: str, made: str, expected: tuple[list[int], list[int], list[int]] | None
) -> None:
    """What was seen flat has the shape of the other side's images, if it is as large."""
    assert found(weight, given, made, Storage("bias", 32, "parameter", shape="8")) == expected


def test_a_convolution_without_a_recorded_weight_has_no_shapes() -> None:
    """Such as one whose weight was computed, and is not a parameter."""
    assert found("", "2x3x10x10", "2x8x10x10") is None


@pytest.mark.parametrize(("weight", "is_found"), [("8x1x3x3", True), ("8x3x3x3", False), ("", False)])
def test_depthwise_convolutions_are_found_by_their_weight(weight: str, *, is_found: bool) -> None:
    """A single input channel for each row of the weight."""
    step = make_step(
        [Op(makes=["x"]), Op("aten.convolution.default", reads=["x", "weight"], makes=["y"])],
        [
            Storage("x", 64, shape="2x8x4x4"),
            Storage("weight", 64, "parameter", shape=weight),
            Storage("y", 64, shape="2x8x4x4"),
        ],
    )
    assert depthwise_ops(step, np.array([1])).tolist() == ([1] if is_found else [])


def test_unfolded_columns_by_hand() -> None:
    """Two bytes for each of 2 images, 3 channels, 9 places of the kernel and 100 of the output; none for one place."""
    assert unfolded_bytes([8, 3, 3, 3], [2, 3, 10, 10], [2, 8, 10, 10], is_backward=False) == 2 * 2 * 3 * 9 * 100
    assert unfolded_bytes([8, 3, 1, 1], [2, 3, 10, 10], [2, 8, 10, 10], is_backward=False) == 0
    # Eight groups of one channel each: the columns of one of them, and an eighth of the joined output, or all of it.
    columns, output = 2 * 2 * 9 * 100, 2 * 2 * 8 * 100
    made = unfolded_bytes([8, 1, 3, 3], [2, 8, 10, 10], [2, 8, 10, 10], is_backward=False)
    assert made == max(columns + output // 8, output)
