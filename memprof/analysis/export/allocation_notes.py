"""What each allocation of a recording is for, in words: category, name or operator, and module."""

from __future__ import annotations

import numpy as np

from memprof.replay.allocator.events import Ids
from memprof.replay.allocator.steps import StepRequests
from memprof.trace.files.coding.coded import Coded
from memprof.trace.schema import NONE, Ints, Modules, Ops, Storages
from memprof.trace.store import Trace


def describe_allocations(trace: Trace, issued: StepRequests) -> tuple[list[str], Ids]:
    """Describes each allocation, such as ``activation aten.relu.default in layers.0``.

    Args:
        trace: The recording of one rank.
        issued: Its requests.

    Returns:
        The distinct descriptions, and the index of each allocation's, shape ``(allocations,)``.
    """
    is_storage = issued.storage_id != NONE
    rows, is_made = issued.storage_id[is_storage], issued.made_by != NONE
    # Each part is coded as a number, 0 for none, and a description as one number of its three parts.
    uses: Coded = trace.columns(Storages, "category")["category"]
    use = np.zeros(len(is_storage), dtype=np.int64)
    use[is_storage] = 1 + uses.codes[rows]
    operators: Coded = trace.columns(Ops, "name")["name"]
    word = np.zeros(len(is_storage), dtype=np.int64)
    word[is_made] = 1 + operators.codes[issued.made_by[is_made]]
    names: Coded = trace.columns(Storages, "name")["name"]
    name = 1 + len(operators.distinct) + names.codes[rows].astype(np.int64)
    word[is_storage] = np.where((names.distinct != "")[names.codes[rows]], name, word[is_storage])
    place = np.zeros(len(is_storage), dtype=np.int64)
    place[~is_storage] = 1 + trace.columns(Ops, "module_id")["module_id"][issued.made_by[~is_storage]]
    place[is_storage] = 1 + trace.columns(Storages, "module_id")["module_id"][rows]
    words = ["", *map(str, operators.distinct), *map(str, names.distinct)]
    places = ["", *(f"in {one}" if one else "" for one in trace.table(Modules).name.tolist())]
    key: Ints = (use * len(words) + word) * len(places) + place
    del use, word, place, name
    found, codes = np.unique(key, return_inverse=True)
    kinds = ["workspace", *map(str, uses.distinct)]
    texts = []
    for one in found.tolist():
        rest, last = divmod(one, len(places))
        first, middle = divmod(rest, len(words))
        texts.append(" ".join(part for part in (kinds[first], words[middle], places[last]) if part))
    return texts, codes.astype(np.int32)
