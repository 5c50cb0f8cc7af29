"""Finds the batch in a recorded step: its size in samples, and which storages grow with it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.rewrite.stack_marks import require_kernels
from memprof.replay.directed import reached
from memprof.trace.schema import NONE, Bools, Ints, read_shape
from memprof.trace.step import Step

#: In the stack of every operator that a DataLoader runs.
DATA_LOADER = "torch/utils/data/dataloader.py:"


def reads_loader(step: Step) -> bool:
    """Returns whether a DataLoader yields the batches of the job."""
    return runs_in(step, DATA_LOADER)


def runs_in(step: Step, place: str) -> bool:
    """Returns whether operators ran below a place: part of a file's path, as stacks have it."""
    return any(place in str(frames) for frames in step.stacks.frames)


Sizes = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Batch:
    """The batch of a step.

    Attributes:
        size: Number of samples.
        is_proportional: Storages whose bytes are a multiple of one sample's. Shape (storages,).
        is_from_input: Storages computed from a model's input, the input included. Shape (storages,).
    """

    size: int
    is_proportional: Bools
    is_from_input: Bools


def find_batch(step: Step, size: int | None = None) -> Batch:
    """Infers from shapes and data flow which storages grow with the batch.

    A storage that forward computes from the input grows with the batch if one of its dimensions is the batch size, or
    a multiple of it (batch times length, flattened) in a shape that no parameter has: a BatchNorm's mean has its
    weight's shape. A storage computed from nothing (an RNN's initial state, a mask) does if one of its dimensions is
    the batch size. Backward makes gradients of both kinds: one with a parameter's shape belongs to the parameter,
    unless forward made a growing storage of exactly that shape.

    Args:
        step: The step.
        size: The batch size, if known; None to infer it, as the first dimension of the inputs.

    Raises:
        PolicyError: No input shows the batch size, it is a single sample, or the step is that of a real run of code
            that torch.compile generated.
    """
    require_kernels(step)
    storages = step.storages
    phase = np.append(step.ops.phase, "older")[storages.created_op_id]  # NONE indexes the last entry
    is_backward = phase == "backward"
    shapes, shape_of = np.unique(storages.shape.astype(str), return_inverse=True)
    sizes = [read_shape(text) for text in shapes]
    from_input = computed_from(step, (storages.category == "input"))
    if size is None:
        is_made = _activations(step, from_input & (phase == "forward"))
        size = _batch_size(sizes, shape_of, _read_by_models(step), is_made)
    if size == 1:
        raise PolicyError("accumulate cannot split the batch of the recorded step: it has a single sample.")

    is_state = np.isin(storages.category, ("parameter", "buffer", "optimizer_state", "gradient"))
    owned = {_canonical(sizes[shape]) for shape in np.unique(shape_of[storages.category == "parameter"])}
    exact = np.array([size in each for each in sizes])
    multiple = np.array([any(one >= size and one % size == 0 for one in each) for each in sizes])
    is_owned = np.array([_canonical(each) in owned for each in sizes])
    # A storage never seen through a tensor has no shape: use its bytes.
    is_blank = (storages.shape == "") & (storages.requested_bytes % size == 0) & (storages.requested_bytes >= 64 * size)

    grows = from_input & (exact | (multiple & ~is_owned))[shape_of]
    grows |= from_input & is_blank
    reads = np.zeros(len(step.ops) + 1, dtype=np.bool_)
    reads[step.uses.op_id[step.uses.role == "read"]] = True
    grows |= ~from_input & ~reads[storages.created_op_id] & exact[shape_of]
    grows &= ~is_state

    made = grows & ~is_backward
    stays = ~grows & ~is_backward & (storages.created_op_id != NONE)
    as_made = np.isin(np.arange(len(shapes)), shape_of[made])
    canonical = np.array([hash(_canonical(each)) for each in sizes], dtype=np.int64)
    like_made = np.isin(canonical, canonical[shape_of[made]])
    like_others = is_owned | np.isin(canonical, canonical[shape_of[stays]])
    backward = np.where(like_others, as_made & exact, like_made | multiple)
    grows = np.where(is_backward, (backward[shape_of] | is_blank) & ~is_state, grows)
    return Batch(size=size, is_proportional=grows & (storages.created_op_id != NONE), is_from_input=from_input)


def likely_batch(step: Step) -> int:
    """Returns the input dimension shared by most storages that forward computes; first dimensions win ties.

    Everything computed from samples has the batch dimension; a sequence length is missing from an RNN's state and from
    pooled tensors, wherever it is in the input's shape.

    Raises:
        PolicyError: No input shows a size.
    """
    storages = step.storages
    phase = np.append(step.ops.phase, "older")[storages.created_op_id]
    from_input = computed_from(step, storages.category == "input")
    shapes, shape_of = np.unique(storages.shape.astype(str), return_inverse=True)
    sizes = [read_shape(text) for text in shapes]
    is_made = _activations(step, from_input & (phase == "forward"))
    read = _read_by_models(step)
    first = _batch_size(sizes, shape_of, read, is_made)
    owned = {size for shape in np.unique(shape_of[storages.category == "parameter"]) for size in sizes[shape]}
    candidates = [first]
    candidates += [size for shape in shape_of[read].tolist() for size in sizes[shape] if size > 1]
    made = Counter(shape_of[is_made].tolist())
    scores = {
        size: sum(times for shape, times in made.items() if _may_be_batch(sizes[shape], size, owned))
        for size in candidates
    }
    return max(candidates, key=lambda size: scores[size])


def _may_be_batch(shape: Sizes, size: int, owned: set[int]) -> bool:
    """Whether a shape has the batch size, or a multiple; one that parameters have, as a width, only as a first size."""
    looked_at = [each for each in shape if each != 1][:1] if size in owned else shape
    return any(each == size or (each % size == 0 and each >= size and each not in owned) for each in looked_at)


def part_sizes(size: int, parts: int) -> Ints:
    """Returns the samples of each micro-batch: equal, or the first ones one larger, as in torch.tensor_split."""
    parts = min(parts, size)
    return np.array([size // parts + (number < size % parts) for number in range(parts)])


def _canonical(sizes: Sizes) -> Sizes:
    """Returns sizes in a canonical order, invariant to transposes and dimensions of size 1."""
    return tuple(sorted(each for each in sizes if each != 1))


def computed_from(step: Step, is_source: Bools) -> Bools:
    """Returns the sources and all storages computed from them, directly or indirectly."""
    uses, storages, ops = step.uses, len(step.storages), len(step.ops)
    is_read = (uses.role == "read") | (uses.role == "mutate")
    # Storages older than the step, such as running statistics, are not made in it: propagation stops there.
    is_write = (uses.role != "read") & (step.storages.created_op_id[uses.storage_id] != NONE)
    start = storages + ops
    sources = np.flatnonzero(is_source)
    tail = np.concatenate([uses.storage_id[is_read], storages + uses.op_id[is_write], np.full(len(sources), start)])
    head = np.concatenate([storages + uses.op_id[is_read], uses.storage_id[is_write], sources])
    return reached(start, tail, head, start + 1)[:storages]


def _activations(step: Step, is_made: Bools) -> Bools:
    """Returns what was computed from parameters too, or all if nothing was.

    A DataLoader without workers transforms single samples in what looks like forward, in modules such as torchvision's
    Normalize: more storages begin with the number of channels then than with the batch.
    """
    is_activation = is_made & computed_from(step, step.storages.category == "parameter")
    return is_activation if np.any(is_activation) else is_made


def _read_by_models(step: Step) -> Ints:
    """Returns the storages that forward reads as input, including batches that are loaded in it.

    A job that evaluates between two updates loads the next batch in what looks like forward: data that modules read,
    that none of them made, and that no parameter went into.
    """
    ops, uses, storages = step.ops, step.uses, step.storages
    is_forward = ops.phase == "forward"
    is_used, is_read = np.zeros((2, len(storages)), dtype=np.bool_)
    is_used[uses.storage_id[is_forward[uses.op_id]]] = True
    is_inside = is_forward & (ops.module_id != NONE)
    is_read[uses.storage_id[is_inside[uses.op_id] & (uses.role != "write")]] = True
    is_loaded = np.append(is_forward & ~is_inside, False)[storages.created_op_id]  # NONE indexes the last entry
    is_loaded &= is_read & ~computed_from(step, storages.category == "parameter")
    return np.flatnonzero((is_used & (storages.category == "input")) | is_loaded)


def _batch_size(sizes: list[Sizes], shape_of: Ints, read: Ints, is_forward: Bools) -> int:
    """Returns the input's first dimension that most storages computed from the inputs begin with."""
    candidates = Counter(sizes[shape][0] for shape in shape_of[read].tolist() if sizes[shape])
    if not candidates:
        raise PolicyError(
            "accumulate: unknown batch size of the recorded step: its model reads no input of a known shape."
        )
    made = Counter(sizes[shape][0] for shape in shape_of[is_forward].tolist() if sizes[shape])
    best = int(max(candidates, key=lambda size: (made[size], candidates[size])))
    if not made[best] and made:
        # The input is a view of a whole data set, whose first dimension is not the batch.
        best = made.most_common(1)[0][0]
    return best
