"""Finds storages by part of a module's, operator's or file's name."""

from __future__ import annotations

import numpy as np

from memprof.trace.schema import NONE, Bools
from memprof_dashboard.sources import Rank


def storages_found(rank: Rank, text: str) -> Bools | None:
    """Returns which storages belong to, or were allocated by, something whose name contains a text.

    Looked through are the names of modules, of the operators that made them, of parameters and states, and the lines
    of the stacks; upper and lower case are the same.

    Args:
        rank: The recording.
        text: What is looked for.

    Returns:
        Shape ``(storages,)``; None where nothing is looked for.
    """
    wanted = text.strip().lower()
    if not wanted:
        return None
    history = rank.history

    def has(texts: np.ndarray) -> np.ndarray:
        return np.fromiter((wanted in str(one).lower() for one in texts), dtype=np.bool_, count=len(texts))

    # One place more for NONE, the last.
    modules = np.append(has(rank.modules.name) | has(rank.modules.type), False)
    stacks = np.append(has(rank.stacks.frames), False)
    operators = has(rank.op_names.distinct)[rank.op_names.codes] | stacks[rank.op_stacks] | modules[history.module]
    names = rank.storage_texts["name"]
    found: Bools = modules[history.owner] | has(names.distinct)[names.codes]
    made = history.created != NONE
    found[made] |= operators[history.created[made]]
    return found
