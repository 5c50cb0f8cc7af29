"""Splits memory that a history shows as always in use or replaced by updates into what it is for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from memprof.trace.schema import NONE, Bools, Ints, Texts

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


def find_replaced(
    created: Ints, freed: Ints, size: Ints, phase: Texts, line: Ints, gradients: Mapping[int, int]
) -> tuple[Bools, Bools]:
    """Returns which lives are weights, and which are state, that updates replace.

    An update makes a tensor that lasts until another one frees it, or to the end of the history, and frees one of the
    same size that is older than the update and not of backward. These are weights, unless as many tensors as there
    are gradients of their size always stay: then they are state. Of several lines, the last makes weights.

    Args:
        created: Row that made each life; NONE if it is older than the history. Shape ``(lives,)``, as the next two.
        freed: Row after which it was freed; NONE if it is alive at the end.
        size: Requested bytes.
        phase: Phase of each row.
        line: Stack of each row.
        gradients: Most gradients at once, by size.
    """
    update = _updates(phase)
    made = np.where(created == NONE, NONE, update[created])
    ended = np.where(freed == NONE, NONE, update[freed])
    by_hand = np.append(phase == "other", False)
    has_gradient = np.isin(size, [one for one, count in gradients.items() if count])
    of_backward = (created != NONE) & (phase[created] == "backward")
    # A loop without an optimizer makes other things between updates, too.
    is_new = (made != NONE) & ((freed == NONE) | (ended > made)) & (has_gradient | ~by_hand[created])
    is_old = (ended != NONE) & (made < ended) & ~of_backward & (has_gradient | ~by_hand[freed])
    weights, states = np.zeros(len(size), dtype=np.bool_), np.zeros(len(size), dtype=np.bool_)
    news, olds = (Counter(zip(size[mask].tolist(), at[mask].tolist(), strict=True)) for mask, at in
                  ((is_new, made), (is_old, ended)))  # fmt: skip
    for one in {one for one, _ in news.keys() & olds.keys()}:
        runs = [run for same, run in news.keys() & olds.keys() if same == one]
        own = (size == one) & is_new & np.isin(made, runs)
        before = (size == one) & is_old & np.isin(ended, runs)
        before &= own | np.isin(freed, created[own]) | (created != NONE)
        kept = int(((size == one) & (freed == NONE) & (made == NONE) & ~of_backward).sum())
        last = line[created[own][-1]]
        is_weight = kept < gradients.get(one, 1)
        weights[own] = is_weight & (line[created[own]] == last)
        states[own] = ~weights[own]
        # What was there before is what the tensor is that was made last when it went.
        rows = np.flatnonzero(before & ~own)
        by = {int(row): bool(now) for row, now in zip(created[own], weights[own], strict=True)}
        weights[rows] = [by.get(row, is_weight) for row in freed[rows].tolist()]
        states[rows] = ~weights[rows]
    return weights, states


def _updates(phase: Texts) -> Ints:
    """Returns the number of the update of each row; NONE for forward, backward, and what comes before a backward."""
    number = np.full(len(phase), NONE, dtype=np.int64)
    runs, is_inside, is_behind = 0, False, False
    for row, name in enumerate(phase.tolist()):
        if name in ("forward", "backward"):
            is_behind, is_inside = name == "backward", False
        elif name == "optimizer" or is_behind:
            runs += not is_inside
            is_inside = True
            number[row] = runs
    return number
