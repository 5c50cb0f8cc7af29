"""Splits memory that a history only shows as always in use into parameters and optimizer state, by sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

#: Smaller tensors have sizes that others have by chance.
_LEAST_BYTES = 4096
#: Counts of updates, one for each parameter, are at most this large.
_STEP_COUNT_BYTES = 8
#: Most tensors of one size for each trained parameter: itself, and three averages (AMSGrad).
_MOST_COPIES = 4
#: Largest deviation of the bytes of parameters and states from a multiple of the gradients', which may be padded.
_PADDING = 0.05
#: Tensors of data that a job keeps, and of one size (a state and the one that follows it).
_MOST_DATA, _MOST_ALIKE = 12, 2


def count_states(kept: Mapping[int, int], gradients: Mapping[int, int], updated: Mapping[int, int]) -> dict[int, int]:
    """Determines how many of the tensors that are always in use are optimizer state.

    A trained parameter has one or more states of its own size. How many parameters of a size are trained is derived

    * from its gradients: every parameter has as few states as a size of trained parameters alone leaves;
    * where gradients have other sizes, from what an update allocates temporarily: copies of weights in a longer type
      have no gradient of backward, but a loop over all of them has a temporary tensor for each;
    * else from sums: gradients of sharded parameters are parts of one tensor.

    Args:
        kept: Number of tensors that are always in use, by size in bytes.
        gradients: Most gradients at once, by size.
        updated: Most temporary tensors of an update at once, by size.

    Returns:
        Number of states by size.
    """
    states = dict.fromkeys(kept, 0)
    trained = {size: count for size, count in kept.items() if gradients.get(size)}
    each = min(
        (round(count / gradients[size]) - 1 for size, count in trained.items() if size >= _LEAST_BYTES), default=0
    )
    for size, count in trained.items():
        states[size] = min(max(each, 0) * gradients[size], count)
    others = {size: count for size, count in kept.items() if size not in trained}
    for size, count in others.items():
        copies, rest = divmod(count, updated.get(size) or count)
        if size >= _LEAST_BYTES and not rest and 1 < copies <= _MOST_COPIES:
            states[size] = count - count // copies
        elif gradients and size <= _STEP_COUNT_BYTES:
            states[size] = count
    if not any(states[size] for size in kept if size > _STEP_COUNT_BYTES):
        states.update(_by_sums(others, sum(size * count for size, count in gradients.items() if size not in trained)))
    return states


def data_sizes(kept: Mapping[int, int], gradients: Mapping[int, int], states: Mapping[int, int]) -> frozenset[int]:
    """Determines which sizes are data that a training job keeps, such as a data set, a replay buffer or a queue.

    Frozen layers are many tensors, and most have the sizes of others. A few large tensors with sizes of their own are
    data instead, though a single frozen tensor looks the same.

    Args:
        kept: Number of tensors that are always in use, by size in bytes.
        gradients: Most gradients at once, by size.
        states: How many of them are optimizer state, by size.
    """
    if not any(gradients.get(size) for size in kept if size >= _LEAST_BYTES):
        return frozenset()  # nothing is known to be trained
    others = {size: count for size, count in kept.items() if not gradients.get(size) and not states.get(size)}
    large = {size: count for size, count in others.items() if size >= _LEAST_BYTES}
    total = sum(size * count for size, count in large.items())
    repeated = sum(size * count for size, count in large.items() if count > _MOST_ALIKE)
    is_data = sum(large.values()) <= _MOST_DATA and 10 * repeated <= total
    return frozenset(others if is_data else ())


def _by_sums(kept: Mapping[int, int], gradient_bytes: int) -> dict[int, int]:
    """Returns the states of parameters whose gradients have as many bytes in all, but other sizes."""
    large = Counter({size: count for size, count in kept.items() if size >= _LEAST_BYTES})
    total = sum(size * count for size, count in large.items())
    ratio = total / gradient_bytes if gradient_bytes else 0.0
    copies = round(ratio)
    is_multiple = 1 < copies <= _MOST_COPIES and abs(ratio - copies) <= _PADDING * copies
    if not is_multiple or any(count % copies for count in large.values()):
        return {}
    return {size: count - count // copies for size, count in large.items()}
