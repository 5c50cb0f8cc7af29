"""Reads the shapes of convolutions, and computes what oneDNN's backward of depthwise ones takes in bf16."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memprof.trace.schema import Ints
from memprof.trace.step import Step

#: Copies of the weight's gradient that oneDNN's depthwise kernel for channels-last tensors sums up on processors with
#: AVX-512, on any number of threads, and bytes of its other buffers.
COPIES, OTHER_BYTES = 256, 8584


def is_depthwise(weight: Sequence[int]) -> bool:
    """Returns whether a convolution with a weight of this shape reads one channel for each that it makes."""
    return weight[1] == 1 and weight[0] > 1


def depthwise_ops(step: Step, ops: Ints) -> Ints:
    """Returns those of some forward convolutions that are depthwise."""
    found = []
    for op in ops.tolist():
        shapes = shapes_of(step, slice(*np.searchsorted(step.uses.op_id, [op, op + 1])))
        if shapes is not None and is_depthwise(shapes[0]):
            found.append(op)
    return np.array(found, dtype=np.int64)


def has_copies(weight: Sequence[int], recorded: int) -> bool:
    """Returns whether the backward of a depthwise convolution took the kernel that sums up copies.

    Args:
        weight: Shape of the weight.
        recorded: Its workspace in float32: the copies, another layout of the weight, and the bias.
    """
    copies = 4 * (COPIES + 1) * int(np.prod(weight))
    return is_depthwise(weight) and recorded - copies in (0, 4 * weight[0])


def short_copies_bytes(weight: Sequence[int], given: Sequence[int], made: Sequence[int], recorded: int) -> int:
    """Returns the workspace of that kernel in bf16.

    It sums up copies in float32 and casts them, and lays out rows of the input and of the gradient in pairs of columns,
    with space for what the kernel reads beyond them. Measured with torch 2.13 on an Intel Xeon, with oneDNN limited to
    AVX-512 and to AMX, on one thread and two: exact to 300 bytes for 58 sizes with kernels of 5, 7 and 9 columns and
    strides of 1 and 2.

    Args:
        weight: Shape of the weight.
        given: Shape of the input.
        made: Shape of the output.
        recorded: The workspace in float32.
    """
    channels, elements = weight[0], int(np.prod(weight))
    high = made[2] if len(made) == 4 else 1
    columns, wide = given[-1], made[-1]
    stride = max(1, round(columns / wide))
    pairs = 2 * -(-wide // 2)
    beyond = 2 * (-(-(weight[-1] // 2) // stride) // 2) + 2
    rows = high * (pairs + stride**2 * (pairs + beyond))
    bias = 64 if recorded > 4 * (COPIES + 1) * elements else 0
    return elements * (4 * COPIES + 2 * (COPIES - 1)) + channels * (32 * rows + bias) + OTHER_BYTES


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

    Args:
        step: The step.
        rows: Its uses in forward.

    Returns:
        The shapes of weight, input and output; None where they are not recorded.
    """
    storages, uses = step.storages, step.uses
    ids, roles = uses.storage_id[rows], uses.role[rows]
    weight = given = made = None
    for storage, role in zip(ids, roles, strict=True):
        text = str(storages.shape[storage])
        if text.count("x") < 2:
            continue
        shape = [int(size) for size in text.split("x")]
        if role != "read":
            made = shape
        elif storages.category[storage] == "parameter":
            weight = shape
        else:
            given = shape
    if weight is None or given is None or made is None:
        return None
    return weight, _with_channels_second(given, weight), _with_channels_second(made, weight)


def _with_channels_second(shape: list[int], weight: list[int]) -> list[int]:
    """Returns a shape with the channels second: the first tensor on its storage may have had them last."""
    is_last = shape[-1] == weight[0] and shape[1] not in weight[:2]
    return [shape[0], shape[-1], *shape[1:-1]] if is_last else shape
