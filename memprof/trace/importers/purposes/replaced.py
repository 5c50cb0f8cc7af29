"""Weights and optimizer state that each update replaces: their data is assigned a new tensor, instead of changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from memprof.trace.schema import NONE, Bools, Ints, Texts


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
