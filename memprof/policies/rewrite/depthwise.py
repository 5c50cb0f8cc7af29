"""Computes what oneDNN's backward of depthwise convolutions takes on a CPU where it sums up copies of a gradient.

It does so for channels-last tensors, with kernels of 5 columns or more or for small images.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memprof.trace.operator_facts import CONVOLUTION_BACKWARD
from memprof.trace.schema import Bools, read_shape
from memprof.trace.step import Step, rows_of

#: Copies of the weight's gradient that are summed up with AVX-512 and with AVX2, on any number of threads.
COPIES, FEWER_COPIES = 256, 64
#: Bytes of the kernel's other buffers in bf16, and the unit of those of each channel.
OTHER_BYTES, CHANNEL_BYTES = 8584, 32


def is_depthwise(weight: Sequence[int]) -> bool:
    """Returns whether a convolution with a weight of this shape reads one channel for each that it makes."""
    return len(weight) > 2 and weight[1] == 1 and weight[0] > 1


def has_copies(weight: Sequence[int], workspace: int, copies: int = COPIES) -> bool:
    """Returns whether the backward of a depthwise convolution in float32 took this kernel.

    Args:
        weight: Shape of the weight.
        workspace: Its workspace: the copies, another layout of the weight, and the bias.
        copies: Number of copies.
    """
    return is_depthwise(weight) and workspace - 4 * (copies + 1) * int(np.prod(weight)) in (0, 4 * weight[0])


def fixed_workspaces(step: Step) -> Bools:
    """Marks the operators whose workspace is that of this kernel, which does not depend on the batch, ``(ops,)``."""
    ops, uses, shapes = step.ops, step.uses, step.storages.shape
    found = np.zeros(len(ops), dtype=np.bool_)
    for op in np.flatnonzero((ops.name == CONVOLUTION_BACKWARD) & (ops.workspace_bytes > 0)).tolist():
        rows, _ = rows_of(uses.op_id, np.array([op]))
        texts = {str(shapes[storage]) for storage in uses.storage_id[rows]}
        found[op] = any(_is_fixed(read_shape(text), int(ops.workspace_bytes[op])) for text in texts)
    return found


def _is_fixed(weight: Sequence[int], workspace: int) -> bool:
    if not is_depthwise(weight):
        return False
    channels = workspace - _casts_of_copies(int(np.prod(weight)))
    is_short = channels > 0 and channels % (CHANNEL_BYTES * weight[0]) == 0
    return is_short or any(has_copies(weight, workspace, copies) for copies in (COPIES, FEWER_COPIES))


def _casts_of_copies(elements: int) -> int:
    """Returns the bytes of the copies in float32, of their casts, and of what the kernel needs besides."""
    return elements * (4 * COPIES + 2 * (COPIES - 1)) + OTHER_BYTES
