"""Storages that outlive their step: inputs of a step were made by the previous one, at that step's size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memprof.planners.scaling.samples import Sample
from memprof.trace.schema import Bools, Ints


def linked(samples: Sequence[Sample], rows: Ints) -> Ints:
    """Finds matched storages that are identical in two consecutive steps of a recording.

    Args:
        samples: The steps.
        rows: Row of each matched storage in each, shape ``(steps, storages)``.

    Returns:
        Pairs of columns of ``rows``, one in the earlier step and one in the next, each once, shape ``(2, pairs)``.
    """
    place = {(one.run, one.step.number): number for number, one in enumerate(samples)}
    pairs = [np.empty((2, 0), dtype=np.int64)]
    for (run, number), earlier in place.items():
        later = place.get((run, number + 1))
        if later is None:
            continue
        before, after = (samples[each].step.storage_ids[rows[each]] for each in (earlier, later))
        _, left, right = np.intersect1d(before, after, return_indices=True)
        pairs.append(np.stack([left, right])[:, left != right])
    return np.unique(np.concatenate(pairs, axis=1), axis=1)


def spread(links: Ints, is_sure: Bools, is_made: Bools) -> Ints:
    """Determines which storage's size gives the size of each: its own, or that of a predecessor or successor.

    Storages a step finds have the size of those steps make, where that is sure. Storages a step makes for the next,
    such as a prefetched batch, are as large as those it found itself.

    Args:
        links: Result of ``linked``.
        is_sure: Which storages' own sizes are known, shape ``(storages,)``.
        is_made: Which storages are made in the step.

    Returns:
        The column that gives the size of each, shape ``(storages,)``.
    """
    source = np.arange(len(is_sure))
    is_settled = is_sure & is_made
    is_known = is_sure.copy()
    for _ in range(links.shape[1]):
        earlier, later = links
        forth = is_settled[earlier] & ~is_settled[later]
        back = is_known[later] & ~is_known[earlier]
        if not (forth | back).any():
            break
        source[later[forth]] = source[earlier[forth]]
        is_settled[later[forth]] = is_known[later[forth]] = True
        back &= ~is_known[earlier]
        source[earlier[back]] = source[later[back]]
        is_settled[earlier[back]] = is_known[earlier[back]] = True
    return source
