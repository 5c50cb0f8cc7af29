"""Partial sums of Hopper's engines for as many multiprocessors as a card has.

Without a GPU, cuDNN plans these engines for 18 multiprocessors, one cluster of the architecture, whatever the device is
said to have. Their grid is persistent: the tiles that are left after full waves are each computed by several blocks,
as many as there are processors for, and their partial sums lie in the workspace. What follows was derived from answers
of cuDNN 9.19 for 1 to 18 processors (``CUDNN_ATTR_ENGINE_SM_COUNT_TARGET``) and is checked for each call against what
cuDNN says for 18; workspaces of an H200 are then equal to the byte (docs/virtual-gpu.md).
"""

from __future__ import annotations

import math
from dataclasses import replace

from memprof.virtual.cudnn.library import Call, Candidate, CudnnError, Library, Tensor

#: Types of knobs: the tile, whether there are no partial sums in the workspace, a cluster's blocks in rows and columns.
_TILE, _WITHOUT_SUMS, _ROWS, _COLUMNS = 2, 25, 27, 28
#: Rows and columns of a tile by its number.
_TILES = {
    0: (128, 128),
    1: (128, 64),
    3: (256, 128),
    4: (256, 64),
    5: (64, 64),
    6: (128, 256),
    7: (64, 128),
    9: (64, 256),
    18: (64, 192),
    19: (128, 192),
}
#: Multiprocessors that cuDNN assumes without a GPU.
_ASSUMED = 18
#: Sums are in fp32.
_FP32 = 4
#: Bytes after the copies: of up to two waves of blocks, of more, and of any with partial sums.
_TWO_WAVES, _WAVES, _SUMS = 16, 147, 175
#: Bytes of counters by which the rule may be off: clusters have a few more, and allocations are rounded to 512.
_COUNTERS = 64
#: What of a card clusters of more than two blocks fill: its GPCs have a remainder. Calls with clusters of three and of
#: eight on an H200 allow 117 to 125 of its 132.
_FILLED = 10 / 11


def bytes_on_card(library: Library, call: Call, candidate: Candidate, processors: int) -> tuple[int, bool]:
    """Returns the workspace of an engine on a whole card, and whether it is certain.

    Args:
        library: cuDNN.
        call: The convolution.
        candidate: The engine, and the bytes that cuDNN states without a GPU.
        processors: Multiprocessors of the card.
    """
    knobs = candidate.knobs
    tile = _TILES.get(knobs.get(_TILE, -1))
    if _ROWS not in knobs or knobs.get(_WITHOUT_SUMS) != 0:
        return candidate.workspace_bytes, True
    if tile is None:
        return candidate.workspace_bytes, False
    try:
        plain = library.workspace_bytes(call, candidate.engine, {**knobs, _WITHOUT_SUMS: 1})
        copies = plain - (_WAVES if plain % 16 == _WAVES % 16 else _TWO_WAVES)
        assumed = copies + _beyond_copies(library, call, candidate, tile, _ASSUMED)
        if abs(assumed - candidate.workspace_bytes) > _COUNTERS:
            return candidate.workspace_bytes, False
        return copies + _beyond_copies(library, call, candidate, tile, processors), True
    except CudnnError:
        return candidate.workspace_bytes, False


def _beyond_copies(library: Library, call: Call, candidate: Candidate, tile: tuple[int, int], processors: int) -> int:
    """Returns the bytes of partial sums and of counters."""
    rows, columns = candidate.knobs[_ROWS], candidate.knobs[_COLUMNS]
    blocks = rows * columns
    filled = processors if blocks <= 2 or processors <= _ASSUMED else int(processors * _FILLED)
    at_once = filled // blocks * blocks
    high, wide = _product_of(call)
    tiles = _rounded(-(-high // tile[0]), rows) * _rounded(-(-wide // tile[1]), columns)
    left = tiles if tiles < at_once else tiles % at_once
    free = at_once // left if left else 1
    parts = 1 if free < 2 else _parts(library, call, candidate, min(free, _ASSUMED), is_later=tiles > at_once)
    if parts < 2:
        return _TWO_WAVES if tiles <= 2 * at_once else _WAVES
    return left * parts * tile[0] * tile[1] * _FP32 + _SUMS + 4 * left * _additions(parts)


def _product_of(call: Call) -> tuple[int, int]:
    """Returns rows and columns of the product of matrices that a convolution is."""
    (x, w, y) = (tensor.sizes for tensor in call.tensors)
    if call.kind == "weight":
        return w[0], math.prod(w[1:])
    moved, channels = (y, w[0]) if call.kind == "forward" else (x, w[1])
    return moved[0] * math.prod(moved[2:]), channels


def _parts(library: Library, call: Call, candidate: Candidate, free: int, *, is_later: bool) -> int:
    """Returns into how many parts the last tiles are split: asked for one tile and so many free processors.

    Args:
        library: cuDNN.
        call: The convolution.
        candidate: The engine.
        free: Processors for each tile, 18 at most.
        is_later: Whether there are full waves before: then as many tiles more as there are processors.
    """
    knobs = {**candidate.knobs, _ROWS: 1, _COLUMNS: 1}
    tile = _TILES[knobs[_TILE]]
    small = _one_tile(call, tile, free if is_later else 0)
    sums = library.workspace_bytes(small, candidate.engine, {**knobs, _WITHOUT_SUMS: 0}, free)
    plain = library.workspace_bytes(small, candidate.engine, {**knobs, _WITHOUT_SUMS: 1}, free)
    return max(1, (sums - plain) // (tile[0] * tile[1] * _FP32))


def _one_tile(call: Call, tile: tuple[int, int], more: int) -> Call:
    """Returns a call whose product has one tile, and as many more, and sums over as much as another call."""
    ones = (1,) * len(call.stride)
    dense = replace(call, stride=ones, dilation=ones)
    if call.kind == "weight":
        channels = 32 + more * tile[0]
        x, y = (Tensor.dense((call.y.sizes[0], count, *call.y.sizes[2:])) for count in (32, channels))
        return replace(dense, x=x, w=Tensor.dense((channels, 32, *ones)), y=y, padding=tuple(0 for _ in ones))
    kernel = call.w.sizes[2:]
    odd = tuple(size - 1 + size % 2 for size in kernel)
    side = tuple(1 for _ in ones[:-2]) + (8, 8)[-len(ones) :]
    images = 1 + more * tile[0] // math.prod(side)
    into, out = (call.w.sizes[1], 32) if call.kind == "forward" else (32, call.w.sizes[0])
    x, y = (Tensor.dense((images, count, *side)) for count in (into, out))
    return replace(dense, x=x, y=y, w=Tensor.dense((out, into, *odd)), padding=tuple(size // 2 for size in odd))


def _additions(parts: int) -> int:
    """Returns how many blocks wait while partial sums are added in pairs, then pairs of pairs."""
    total = 0
    while parts > 1:
        parts = -(-parts // 2)
        total += parts
    return total


def _rounded(count: int, step: int) -> int:
    return -(-count // step) * step
