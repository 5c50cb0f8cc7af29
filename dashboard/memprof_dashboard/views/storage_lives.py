"""Storage lifetimes in a range of a recording: how long each is alive, and how long after its last use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.replay.history import History, Ids
from memprof.trace.schema import NONE, Bools, Floats, Ints, Uses
from memprof.trace.store import Trace
from memprof_dashboard.views.placement import addresses_of, compress, first_fit

#: Maximum blocks drawn: more rectangles make a browser slow.
MOST_BLOCKS = 2_000
#: Maximum storages listed as wasters.
MOST_IDLE = 10


class StorageLives:
    """Data of the blocks view, read once per recording.

    Attributes:
        history: The recording.
        address: Address of each storage, ``NONE`` where it is unknown.
        by_address: Rows of the storages whose address is known, by address.
        right: The operator after the last at which each storage is alive.
        last_use: Last operator that touches each storage, ``NONE`` where the recording does not contain it.
        idle: First operator at which each storage is only held: the one after its last use; the same as ``right``
            where there is none or the recording does not contain it.
    """

    def __init__(self, trace: Trace, history: History) -> None:
        """Reads it.

        Raises:
            BadInputError: The recording is damaged.
        """
        self.history = history
        self.address: Ints = addresses_of(trace)
        known = np.flatnonzero(self.address != NONE)
        self.by_address: Ids = known[np.argsort(self.address[known], kind="stable")].astype(np.int32)
        uses = trace.columns(Uses, "op_id", "storage_id")
        self.last_use: Ids = np.full(len(history.size), NONE, dtype=np.int32)
        np.maximum.at(self.last_use, uses["storage_id"], uses["op_id"].astype(np.int32))
        del uses
        self.right: Ids = np.where(history.freed == NONE, history.ops, history.freed + 1).astype(np.int32)
        # A storage alive at the end may be used later, unless a whole step passed without a use.
        is_told = (self.last_use != NONE) & ((history.freed != NONE) | (self.last_use < _last_step(history)))
        self.idle: Ids = np.where(is_told, self.last_use + 1, self.right).astype(np.int32)


def _last_step(history: History) -> int:
    """Returns where the last step begins; 0 where there is only one."""
    if not history.ops:
        return 0
    return int(np.searchsorted(history.step, history.step[-1]))


@dataclass(frozen=True, eq=False)
class Stretch:
    """The non-empty storages alive in a range of a recording.

    Attributes:
        lives: The recording.
        first: First operator of the range.
        end: End of the range (exclusive).
        rows: Rows of the storages, ascending.
        weight: Bytes times operators of each within the stretch.
    """

    lives: StorageLives
    first: int
    end: int
    rows: Ints
    weight: Floats


def cut_stretch(lives: StorageLives, first: int, end: int, is_wanted: Bools | None = None) -> Stretch:
    """Returns the storages alive in a range.

    Args:
        lives: The recording.
        first: First operator of the range.
        end: End of the range (exclusive).
        is_wanted: Which storages are looked at, shape ``(storages,)``; None for all.
    """
    history = lives.history
    is_visible = (history.created < end) & (lives.right > first) & (history.size > 0)
    if is_wanted is not None:
        is_visible &= is_wanted
    rows = np.flatnonzero(is_visible)
    life = np.minimum(lives.right[rows], end) - np.maximum(history.created[rows], first)
    return Stretch(lives, first, end, rows, life * history.size[rows].astype(np.float64))


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks drawn for a range: its largest, by bytes times operators.

    Attributes:
        rows: Rows of the storages drawn, shape ``(blocks,)``.
        y: Where each begins, in bytes.
        top: Where the highest ends.
        floor: Below it blocks are packed, as their address is unknown; above it are addresses. 0 where all are
            addresses, the same as ``top`` where none are.
        cut_bytes: Gaps between addresses of more bytes than this were cut out.
        cuts: How many were.
        alive: Number of non-empty storages alive in the range.
        share: What is drawn of their bytes times operators, from 0 to 1.
    """

    rows: Ints
    y: Ints
    top: int
    floor: int
    cut_bytes: int
    cuts: int
    alive: int
    share: float


def choose_blocks(stretch: Stretch, most: int = MOST_BLOCKS) -> Blocks:
    """Chooses the largest blocks of a range, at most ``most``, and places them."""
    lives, history, visible = stretch.lives, stretch.lives.history, stretch.rows
    chosen = _largest(stretch.weight, most)
    rows = visible[chosen]
    total = float(stretch.weight.sum())
    share = float(stretch.weight[chosen].sum()) / total if total else 1.0

    is_known = lives.address[rows] != NONE
    unknown = rows[~is_known]
    packed = first_fit(history.created[unknown], lives.right[unknown], history.size[unknown])
    floor = int((packed + history.size[unknown]).max(initial=0))
    y = np.zeros(len(rows), dtype=np.int64)
    y[~is_known] = packed
    top, cut_bytes, cuts = floor, 0, 0
    if is_known.any():
        is_visible = np.zeros(len(history.size), dtype=np.bool_)
        is_visible[visible] = True
        ordered = lives.by_address[is_visible[lives.by_address]]
        compressed = compress(lives.address[ordered], history.size[ordered])
        place = np.zeros(len(history.size), dtype=np.int64)
        place[ordered] = compressed.y
        floor += floor // 40  # a gap that shows where addresses begin
        y[is_known] = floor + place[rows[is_known]]
        top, cut_bytes, cuts = floor + compressed.top, compressed.cut_bytes, compressed.cuts
    return Blocks(rows, y, top, floor, cut_bytes, cuts, len(visible), share)


@dataclass(frozen=True, eq=False)
class IdleStorages:
    """The storages of a range that waste most: bytes times the operators they are held for after their last use.

    Attributes:
        rows: Their rows, the worst first.
        held: Operators of the stretch that each is held for after its last use.
        waste: Bytes times operators of each.
        share: What all storages waste of the stretch's bytes times operators, from 0 to 1.
    """

    rows: Ints
    held: Ints
    waste: Floats
    share: float


def find_idle(stretch: Stretch, most: int = MOST_IDLE) -> IdleStorages:
    """Returns the storages that waste most after their last use, at most ``most``."""
    lives, rows = stretch.lives, stretch.rows
    held = np.maximum(np.minimum(lives.right[rows], stretch.end) - np.maximum(lives.idle[rows], stretch.first), 0)
    waste = held * lives.history.size[rows].astype(np.float64)
    chosen = _largest(waste, most)
    chosen = chosen[waste[chosen] > 0]
    total = float(stretch.weight.sum())
    return IdleStorages(rows[chosen], held[chosen], waste[chosen], float(waste.sum()) / total if total else 0.0)


def _largest(weight: Floats, most: int) -> Ints:
    places = np.arange(len(weight)) if len(weight) <= most else np.argpartition(-weight, most - 1)[:most]
    ordered: Ints = places[np.lexsort((places, -weight[places]))]
    return ordered
