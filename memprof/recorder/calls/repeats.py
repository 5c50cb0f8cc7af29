"""Marks operators that run again (recompute): recordings flag them and attribute them to their first run."""

from __future__ import annotations

#: Autograd's sequence number at the first run of the operator being rerun; -1 while none is.
sequence = -1


def begin(first_sequence: int) -> int:
    """Marks the start of a rerun of an operator.

    Args:
        first_sequence: Autograd's sequence number at its first run.

    Returns:
        The previous mark, for `end`.
    """
    global sequence  # one value per process, read at every logged operator
    before, sequence = sequence, first_sequence
    return before


def end(before: int) -> None:
    """Marks the end of the rerun."""
    global sequence  # noqa: PLW0603 - one value per process, read at every logged operator
    sequence = before
