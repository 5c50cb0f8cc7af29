"""Sizes of elements, by the names of their types in a recording."""

from __future__ import annotations

import re

import numpy as np

from memprof.trace.schema import Ints, Texts


def element_bytes(dtypes: Texts) -> Ints:
    """Returns the bytes of one element of each type, such as bfloat16, float8_e4m3fn or bool; 1 for unnamed ones."""
    sizes = {dtype: _size_of(str(dtype)) for dtype in set(dtypes.tolist())}
    return np.array([sizes[dtype] for dtype in dtypes.tolist()], dtype=np.int64)


def _size_of(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1
