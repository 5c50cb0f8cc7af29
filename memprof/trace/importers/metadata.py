"""What a job noted in its snapshot: metadata of its allocations, annotations of their tensors, and phases in these."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from memprof.phases import MOST_NAMES, PHASES, is_own_name
from memprof.trace.importers.allocations import Allocations
from memprof.trace.importers.columns import ANNOTATE, Blocks, Entries
from memprof.trace.schema import NONE, Texts

#: Between what was noted of one tensor at different times.
_BETWEEN = "; "


def noted_of_lives(entries: Entries, blocks: Blocks, lives: Allocations) -> Texts:
    """Returns what the job noted of each life: metadata of its allocation, then its annotations, "" for nothing.

    Args:
        entries: The history, whose ``annotate`` entries have the address of what they are about.
        blocks: The end state.
        lives: Lives of its blocks.
    """
    if not any(entries.user_metadata):
        return np.full(len(lives), "", dtype=object)
    noted = ["" if entry == NONE else entries.user_metadata[entry] for entry in lives.alloc.tolist()]
    about: dict[int, list[int]] = {}
    for row in np.flatnonzero(entries.action == ANNOTATE).tolist():
        about.setdefault(int(entries.address[row]), []).append(row)
    if not about:
        return np.array(noted, dtype=object)
    first, last = lives.alloc.tolist(), np.where(lives.free == NONE, len(entries), lives.free).tolist()
    for life, block in enumerate(lives.block.tolist()):
        entry = next((one for one in (first[life], int(lives.free[life])) if one != NONE), NONE)
        address = int(blocks.address[block] if entry == NONE else entries.address[entry])
        rows = about.get(address, [])  # ascending
        found = [
            entries.user_metadata[row] for row in rows[bisect_right(rows, first[life]) : bisect_left(rows, last[life])]
        ]
        noted[life] = _BETWEEN.join(dict.fromkeys(text for text in (noted[life], *found) if text))
    return np.array(noted, dtype=object)


def noted_phases(metadata: Sequence[str]) -> Texts:
    """Returns the phase that each metadata names, as in ``{"phase": "forward"}``; "" where it names none.

    Names that memprof does not allow for phases count as none, and so do those beyond the first 64 distinct ones.
    """
    named = {text: _phase(text) for text in dict.fromkeys(metadata)}
    own = [name for name in dict.fromkeys(named.values()) if name not in PHASES]
    allowed = {*PHASES, *own[: MOST_NAMES + 1]}  # "" is one of them
    return np.array([named[text] if named[text] in allowed else "" for text in metadata], dtype=object)


def _phase(text: str) -> str:
    if not text.startswith("{"):
        return ""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    name = found.get("phase") if isinstance(found, dict) else None
    return name if isinstance(name, str) and is_own_name(name) else ""
