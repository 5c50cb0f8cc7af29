"""Views through which operators read storages: which part of a storage, and whether the caller made the view."""

from __future__ import annotations

import numpy as np

from memprof.trace.files.columns import Coded
from memprof.trace.schema import Bools, Ints
from memprof.trace.step import Step

#: Views of a part of their input.
_PARTS = ("select", "slice", "unbind", "split", "split_with_sizes", "chunk", "as_strided", "narrow", "diagonal")
#: Views that a function makes of its own arguments: linear's of its weight, a product's of what it multiplies.
_INTERNAL = ("t", "view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze", "detach", "alias")
_MADE_BY_CALLER = (*_PARTS, "permute", "transpose", "movedim", "swapaxes")


def bytes_read(step: Step, sources: Ints, readers: Ints) -> Ints:
    """Returns how many bytes of each source its reader uses: less than the storage has where it reads a view of a part.

    Only an operator's total reads are known; where they are less than its storages, the source's view accounts for it,
    unless views of a part were made of the reader's other storages alone.

    Args:
        step: The step.
        sources: Storages.
        readers: An operator that reads each.
    """
    uses = step.uses
    is_read = uses.role != "write"
    held = np.zeros(len(step.ops), dtype=np.int64)
    np.add.at(held, uses.op_id[is_read], step.storages.requested_bytes[uses.storage_id[is_read]])
    is_divided = np.zeros(len(step.storages), dtype=np.bool_)
    is_divided[uses.storage_id[_named(step, _PARTS)[uses.op_id]]] = True
    reads_part = np.zeros(len(step.ops), dtype=np.bool_)
    reads_part[uses.op_id[is_read & is_divided[uses.storage_id]]] = True
    whole = step.storages.requested_bytes[sources]
    excess = np.maximum(held[readers] - step.ops.read_bytes[readers], 0)
    is_part = (excess < whole) & (is_divided[sources] | ~reads_part[readers])
    return np.where(is_part, whole - excess, whole)


def reads_callers_view(step: Step, sources: Ints, readers: Ints) -> Bools:
    """Returns which readers are given a view that their caller made of the source: ``x @ weight.T``, not ``linear``.

    Args:
        step: The step.
        sources: Storages.
        readers: An operator that reads each.
    """
    uses, count = step.uses, len(step.ops) + 1
    keys = np.unique(uses.storage_id * count + uses.op_id)
    storage, op = keys // count, keys % count
    place = np.arange(len(keys))
    # Walk back from each reader through the uses of its storage, to the first that is not a view.
    is_bound = np.append(True, np.diff(storage) != 0)[: len(keys)]
    is_view = _named(step, (*_INTERNAL, *_MADE_BY_CALLER))[op]
    bound = np.maximum.accumulate(np.where(is_bound, place - 1, np.append(-1, np.where(is_view, -1, place)[:-1])))
    made = np.maximum.accumulate(np.where(_named(step, _MADE_BY_CALLER)[op], place, -1))
    found: Bools = (made > bound)[np.searchsorted(keys, sources * count + readers)]
    return found


def _named(step: Step, names: tuple[str, ...]) -> Bools:
    """Returns which operators of ATen have one of the names, whatever the overload; ``(ops,)``."""
    coded = Coded.of(step.ops.name)
    is_named = np.array(
        [str(name).partition(".")[2].partition(".")[0] in names for name in coded.distinct], dtype=np.bool_
    )
    return is_named[coded.codes]
