"""Lets what runs operators again say so: recordings mark them, and give them the place of their first run."""

from __future__ import annotations

#: Autograd's counter while the operator that is running again ran first; -1 while none is.
sequence = -1


def begin(first_sequence: int) -> int:
    """Notes that an operator runs again.

    Args:
        first_sequence: Autograd's counter while it ran first.

    Returns:
        What was noted before, for `end`.
    """
    global sequence  # one answer a process, read at every operator that is logged
    before, sequence = sequence, first_sequence
    return before


def end(before: int) -> None:
    """Notes that it has run."""
    global sequence  # noqa: PLW0603 - one answer a process, read at every operator that is logged
    sequence = before
