"""Spans of time in which something holds for a storage, and the one that covers a given moment."""

from __future__ import annotations

import numpy as np

from memprof.trace.schema import NONE, Ints


def find_spans(storage_ids: Ints, moments: Ints, *, of: Ints, first: Ints, last: int | Ints) -> Ints:
    """Finds the span of a storage that covers a moment; of several, the one that begins last.

    Args:
        storage_ids: The storages looked up.
        moments: A moment for each; NONE is in no span.
        of: The storage of each span, shape ``(spans,)``.
        first: First moment of each span.
        last: Last moment of each span, or of all; ``first`` again for spans of one moment.

    Returns:
        Rows of the spans, as long as ``storage_ids``; NONE where no span covers the moment.
    """
    order = np.lexsort((first, of))
    width = max(int(moments.max(initial=0)), int(first.max(initial=0))) + 2
    keys = of[order] * width + first[order]
    place = np.searchsorted(keys, storage_ids * width + moments, side="right") - 1
    rows = np.append(order, NONE)[place]  # the last entry stands for no span
    is_same = np.append(of, NONE)[rows] == storage_ids
    is_within = moments <= np.append(np.broadcast_to(last, len(of)), NONE)[rows]
    return np.where(is_same & is_within, rows, NONE)
