"""Two lossless codings of integers: differences of neighbours, and distances to the last equal value."""

from __future__ import annotations

import numpy as np

from memprof.trace.schema import Ints

#: Rows decoded at once: their values and pointers fit a processor's cache.
_BLOCK = 1 << 15


def differences(values: Ints) -> Ints:
    """Returns the first value and the differences that follow; they wrap around, so any values can be coded.

    Args:
        values: Shape (n,).
    """
    return np.diff(values, prepend=np.zeros(1, dtype=np.int64))


def from_differences(coded: Ints) -> Ints:
    """Decodes ``differences``."""
    return np.cumsum(coded, dtype=np.int64)


def distances(values: Ints) -> tuple[Ints, Ints]:
    """Codes each value as the number of rows since the last equal one.

    Addresses are reused in the same order in every step, so their distances repeat, which the addresses do not.

    Args:
        values: Shape (n,).

    Returns:
        The distances, 0 where a value appears for the first time, shape (n,); and those values, in order.
    """
    order = np.argsort(values, kind="stable")
    arranged = values[order]
    last = np.full(len(values), -1, dtype=np.int64)
    is_repeated = arranged[1:] == arranged[:-1]
    last[order[1:][is_repeated]] = order[:-1][is_repeated]
    is_first = last < 0
    return np.where(is_first, 0, np.arange(len(values)) - last), values[is_first]


def from_distances(coded: Ints, first: Ints) -> Ints:
    """Decodes ``distances``.

    Args:
        coded: The distances. Shape (n,).
        first: The values that appear for the first time, in order.

    Raises:
        ValueError: A distance points outside the table, or their number does not match.
    """
    rows = np.arange(len(coded))
    is_first = coded == 0
    if np.any((coded < 0) | (coded > rows)) or int(is_first.sum()) != len(first):
        raise ValueError("its distances point outside the table")
    values = np.empty(len(coded), dtype=np.int64)
    values[is_first] = first
    for low in range(0, len(coded), _BLOCK):
        block = slice(low, low + _BLOCK)
        source = rows[block] - coded[block]
        is_before = source < low
        values[block][is_before] = values[source[is_before]]
        # Within the block, every row points to an earlier one, or to itself where its value is known.
        pointer = np.where(is_before, rows[block], source) - low
        while not np.array_equal(further := pointer[pointer], pointer):
            pointer = further
        values[block] = values[block][pointer]
    return values
