"""Marks operators by what their Python stacks pass through."""

from __future__ import annotations

import re
from weakref import WeakKeyDictionary

import numpy as np

from memprof.trace.schema import Bools, Stacks
from memprof.trace.step import Step

#: Which stacks match each pattern: every plan of a search asks for the same.
_FOUND: WeakKeyDictionary[Stacks, dict[re.Pattern[str], Bools]] = WeakKeyDictionary()


def ran_within(step: Step, pattern: re.Pattern[str]) -> Bools:
    """Marks the operators whose stacks match a pattern, shape ``(ops,)``; none without stacks."""
    found = _FOUND.setdefault(step.stacks, {})
    if pattern not in found:
        matches = [bool(pattern.search(str(frames))) for frames in step.stacks.frames]
        found[pattern] = np.array([*matches, False], dtype=np.bool_)  # NONE indexes the last entry
    marked: Bools = found[pattern][step.ops.stack_id]
    return marked
