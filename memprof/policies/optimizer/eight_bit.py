"""Bytes of optimizer state in 8 bits."""

from __future__ import annotations

import numpy as np

from memprof.trace.schema import Ints

#: Parameters with fewer elements, or whose element count is no multiple of a block, keep 32 bits; each block has a
#: scale of 4 bytes, each state a table of 256 numbers (torchao and bitsandbytes alike).
_FROM, _BLOCK, _TABLE_BYTES = 4096, 256, 1024


def eight_bit_bytes(sizes: Ints) -> Ints:
    """Returns the bytes of states of float32 once they are kept in 8 bits.

    Args:
        sizes: Their bytes.
    """
    numbers = sizes // 4
    is_short = (numbers >= _FROM) & (numbers % _BLOCK == 0)
    return np.where(is_short, numbers + numbers // _BLOCK * 4 + _TABLE_BYTES, sizes)
