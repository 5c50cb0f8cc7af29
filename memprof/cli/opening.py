"""Opens a recording for a verb, scrubbed if it will be shared."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memprof.trace.store import Trace


def open_trace(path: str, rank: int | None = None, *, is_scrubbed: bool) -> Trace:
    """Opens a recording.

    Args:
        path: The recording.
        rank: The rank to read; None for the first.
        is_scrubbed: Leave out the job's arguments and the identity of its owner.

    Raises:
        BadInputError: The recording cannot be opened.
        UsageError: The recording has no such rank.
    """
    from memprof.trace.store import Trace

    opened = Trace.open(path, rank)
    if not is_scrubbed:
        return opened
    from memprof.analysis.export.scrub import own_names, scrubbed

    return scrubbed(opened, names=own_names())
