"""Reads the shapes of convolutions, and computes the workspace of torch's own kernels for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memprof.policies.rewrite.depthwise import is_depthwise
from memprof.trace.schema import Ints
from memprof.trace.step import Step


def depthwise_ops(step: Step, ops: Ints) -> Ints:
    """Returns those of some forward convolutions that are depthwise."""
    found = []
    for op in ops.tolist():
        weight = _sides(step, slice(*np.searchsorted(step.uses.op_id, [op, op + 1])))[0]
        if weight is not None and is_depthwise(weight):
            found.append(op)
    return np.array(found, dtype=np.int64)


def unfolded_bytes(weight: Sequence[int], given: Sequence[int], made: Sequence[int], *, is_backward: bool) -> int:
    """Returns the workspace of torch's own kernel in a short type, which unfolds the input into columns.

    It does so for one group of channels after the other, and then joins their results. Measured with torch 2.13, with
    oneDNN limited to AVX2: exact in 12 of 14 depthwise convolutions.

    Args:
        weight: Shape of the weight.
        given: Shape of the input.
        made: Shape of the output.
        is_backward: Whether it computes the gradients.
    """
    kernel = int(np.prod(weight[2:]))
    is_transposed = given[1] == weight[0] and made[1] != weight[0]
    if kernel == 1:
        return 0
    groups = 1 if is_transposed else given[1] // weight[1]
    places = int(np.prod((given if is_transposed else made)[2:]))
    columns = 2 * given[0] * (made[1] if is_transposed else given[1] // groups) * kernel * places
    if groups == 1:
        return columns
    read, written = 2 * int(np.prod(given)), 2 * int(np.prod(made))
    if is_backward:
        return max(columns + (read + written) // groups, read + 2 * int(np.prod(weight)))
    return max(columns + written // groups, written)


def shapes_of(step: Step, rows: slice) -> tuple[list[int], list[int], list[int]] | None:
    """Reads a convolution's shapes.

    The shape of a storage is that of the first tensor on it, which may have had the channels last, or fewer dimensions.

    Args:
        step: The step.
        rows: Its uses in forward.

    Returns:
        The shapes of weight, input and output; None where they are not recorded.
    """
    weight, given, made = _sides(step, rows)
    if weight is None or not given or not made:
        return None
    given, made = _with_channels_second(given, weight), _with_channels_second(made, weight)
    if len(given) == len(weight) and len(made) != len(weight):
        made = _like(given, made, weight[0])
    elif len(made) == len(weight) and len(given) != len(weight):
        given = _like(made, given, weight[0] if is_depthwise(weight) else weight[1])
    has_all = len(given) == len(made) == len(weight)
    # Of an input that is part of a data set, the storage has the shape of the whole.
    return (weight, [made[0], *given[1:]], made) if has_all else None


def _sides(step: Step, rows: slice) -> tuple[list[int] | None, list[int] | None, list[int] | None]:
    """Reads the shapes of weight, input and output as they are recorded; None where one is missing."""
    storages, uses = step.storages, step.uses
    weight = given = made = None
    for storage, role in zip(uses.storage_id[rows], uses.role[rows], strict=True):
        shape = [int(size) for size in str(storages.shape[storage]).split("x") if size]
        is_parameter = storages.category[storage] == "parameter"
        if role != "read":
            made = shape
        elif is_parameter and len(shape) > 2:
            weight = shape
        elif not is_parameter and len(shape) > 1:
            given = shape
    return weight, given, made


def _like(known: list[int], other: list[int], channels: int) -> list[int]:
    """Returns the shape of another tensor as large as an image of ``channels``; as it is if it is of another size."""
    shape = [known[0], channels, *known[2:]]
    return shape if np.prod(shape) == np.prod(other) else other


def _with_channels_second(shape: list[int], weight: list[int]) -> list[int]:
    """Returns a shape with the channels second, where they are last."""
    is_last = len(shape) == len(weight) and shape[-1] == weight[0] and shape[1] not in weight[:2]
    return [shape[0], shape[-1], *shape[1:-1]] if is_last else shape
