"""Views through which operators read storages: which part of a storage, and whether the caller made the view."""

from __future__ import annotations

import numpy as np

from memprof.trace.files.coding.coded import coded_column
from memprof.trace.kept import kept
from memprof.trace.schema import Bools, Ints
from memprof.trace.step import Step

#: Views of a part of their input.
_PARTS = ("select", "slice", "unbind", "split", "split_with_sizes", "chunk", "as_strided", "narrow", "diagonal")
#: Views that a function makes of its own arguments: linear's of its weight, a product's of what it multiplies.
_INTERNAL = ("t", "view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze", "detach", "alias")
_MADE_BY_CALLER = (*_PARTS, "permute", "transpose", "movedim", "swapaxes")


def reads_callers_view(step: Step, sources: Ints, readers: Ints) -> Bools:
    """Returns which readers are given a view that their caller made of the source: ``x @ weight.T``, not ``linear``.

    Args:
        step: The step.
        sources: Storages.
        readers: An operator that reads each.
    """
    keys, bound = _views_until(step, (*_INTERNAL, *_MADE_BY_CALLER))
    count, place = len(step.ops) + 1, np.arange(len(keys))
    made = np.maximum.accumulate(np.where(_named(step, _MADE_BY_CALLER)[keys % count], place, -1))
    found: Bools = (made > bound)[np.searchsorted(keys, sources * count + readers)]
    return found


@kept
def _views_until(step: Step, names: tuple[str, ...]) -> tuple[Ints, Ints]:
    """Walks back from each use of a storage through its uses before, to the first that is not a view.

    Args:
        step: The step.
        names: Names of views.

    Returns:
        Uses, one a storage and operator, as ``storage * (ops + 1) + operator``, in order; and the place of that first
        one, or the place before the storage's first.
    """
    uses, count = step.uses, len(step.ops) + 1
    keys: Ints = np.unique(uses.storage_id * count + uses.op_id)
    place = np.arange(len(keys))
    is_bound = np.append(True, np.diff(keys // count) != 0)[: len(keys)]
    is_view = _named(step, names)[keys % count]
    bound = np.maximum.accumulate(np.where(is_bound, place - 1, np.append(-1, np.where(is_view, -1, place)[:-1])))
    return keys, bound


@kept
def _named(step: Step, names: tuple[str, ...]) -> Bools:
    """Returns which operators of ATen have one of the names, whatever the overload; ``(ops,)``."""
    coded = coded_column(step.ops, "name")
    is_named = np.array(
        [str(name).partition(".")[2].partition(".")[0] in names for name in coded.distinct], dtype=np.bool_
    )
    return is_named[coded.codes]
