"""Graphs of known shape, built from arrays: chains, a U-Net, a residual network, and random ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

from memprof.planners.graph.arrays import step_from_arrays
from memprof.trace.step import Step


def mirrored(
    inputs: Sequence[Sequence[int]],
    output_bytes: Sequence[int],
    time_us: Sequence[float],
    *,
    backward_factor: float = 2.0,
    needs_output: Sequence[bool] | None = None,
    workspace_bytes: Sequence[int] | None = None,
    fixed_bytes: int = 0,
) -> Step:
    """Adds the backward of a forward graph, operator by operator in reverse.

    The backward of operator *i* reads what *i* read, its own output where ``needs_output`` says so, and the gradients
    that its readers' backwards made; it makes one gradient as large as the output of *i*'s first input.
    """
    count = len(inputs)
    needs = list(needs_output) if needs_output is not None else [False] * count
    readers: list[list[int]] = [[] for _ in range(count)]
    for op_id, read in enumerate(inputs):
        for other in read:
            readers[other].append(op_id)
    all_inputs = [list(read) for read in inputs]
    sizes, times, backward = list(output_bytes), list(time_us), [False] * count
    workspace = list(workspace_bytes) if workspace_bytes is not None else [0] * count
    for op_id in reversed(range(count)):
        place = 2 * count - 1 - op_id
        gradients = [2 * count - 1 - reader for reader in readers[op_id]]
        all_inputs.append([*inputs[op_id], *([op_id] if needs[op_id] else []), *gradients])
        sizes.append(sum(output_bytes[other] for other in inputs[op_id][:1]) or 1)
        times.append(time_us[op_id] * backward_factor)
        backward.append(True)
        workspace.append(workspace[op_id])
        assert place == len(all_inputs) - 1
    return step_from_arrays(
        time_us=times,
        output_bytes=sizes,
        inputs=all_inputs,
        is_backward=backward,
        workspace_bytes=workspace,
        fixed_bytes=fixed_bytes,
    )


def chain(layers: int, *, output_bytes: int = 1000, time_us: float = 10.0) -> Step:
    """Builds layers of one size, each of which needs its input in backward."""
    inputs = [[op_id - 1] if op_id else [] for op_id in range(layers)]
    return mirrored(inputs, [output_bytes] * layers, [time_us] * layers)


def uneven_chain(layers: int, seed: int) -> Step:
    """Builds a chain of layers of random sizes and times."""
    draw = random.Random(seed)
    return mirrored(
        [[op_id - 1] if op_id else [] for op_id in range(layers)],
        [draw.randint(1, 20) * 100 for _ in range(layers)],
        [float(draw.randint(1, 20)) for _ in range(layers)],
        needs_output=[draw.random() < 0.5 for _ in range(layers)],
        workspace_bytes=[draw.randint(0, 5) * 100 for _ in range(layers)],
    )


def unet(depth: int) -> Step:
    """Builds a U-Net: each level down halves the size, each level up reads the level's output on the way down."""
    inputs: list[list[int]] = []
    sizes: list[int] = []
    skips = []
    for level in range(depth):
        for _ in range(2):
            inputs.append([len(inputs) - 1] if inputs else [])
            sizes.append(16_000 >> level)
        skips.append(len(inputs) - 1)
        inputs.append([len(inputs) - 1])
        sizes.append(16_000 >> (level + 1))
    for level in reversed(range(depth)):
        inputs.append([len(inputs) - 1, skips[level]])
        sizes.append(32_000 >> level)
        inputs.append([len(inputs) - 1])
        sizes.append(16_000 >> level)
    return mirrored(inputs, sizes, [size / 100 for size in sizes], needs_output=[True] * len(inputs))


def residual(blocks: int, seed: int = 0) -> Step:
    """Builds residual blocks: convolution, normalisation, activation, twice, and an addition of the block's input."""
    draw = random.Random(seed)
    inputs: list[list[int]] = [[]]
    sizes, times = [4000], [5.0]
    for block in range(blocks):
        size = max(500, 4000 >> (block * 3 // max(blocks, 1)))
        entry = len(inputs) - 1
        for cost in (40.0, 4.0, 2.0, 40.0, 4.0):
            inputs.append([len(inputs) - 1])
            sizes.append(size)
            times.append(cost + draw.random())
        inputs.append([len(inputs) - 1, entry])
        sizes.append(size)
        times.append(2.0)
        inputs.append([len(inputs) - 1])
        sizes.append(size)
        times.append(2.0)
    return mirrored(inputs, sizes, times)


def random_graph(operators: int, seed: int) -> Step:
    """Builds a graph in which each operator reads the one before it and up to two others."""
    draw = random.Random(seed)
    inputs: list[list[int]] = []
    for op_id in range(operators):
        before = [op_id - 1] if op_id else []
        more = [draw.randrange(op_id) for _ in range(draw.randint(0, 2))] if op_id else []
        inputs.append(sorted(set(before + more)))
    return mirrored(
        inputs,
        [draw.randint(1, 50) * 100 for _ in range(operators)],
        [float(draw.randint(1, 50)) for _ in range(operators)],
        needs_output=[draw.random() < 0.4 for _ in range(operators)],
        workspace_bytes=[draw.randint(0, 5) * 100 for _ in range(operators)],
        fixed_bytes=draw.randint(0, 10) * 1000,
    )
