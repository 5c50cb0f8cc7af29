"""Whether lives fit below a height: a depth-first search over the order in which they are placed.

Source: Moffitt 2023, MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning, sections 3
and 4: placing in order of offsets (canonical solutions), no gap that another life would fit into (dominance), the bytes
still to come above each section's floor (inference), and parts that no longer meet, each on its own (decomposition).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from memprof.replay.static.intervals import Sections
from memprof.trace.schema import Bools, Ints

#: The lowest offset of a life that has been placed: no other is as high.
_PLACED = 1 << 60
#: Nodes between two looks at the clock.
_NODES_PER_LOOK = 32
#: The columns of a part are rebuilt where fewer of them than this share belong to lives still to be placed.
_WORTH_KEEPING = 0.7


class LimitReachedError(Exception):
    """The search ended without a result: it had too few nodes, or too little time."""


@dataclass(frozen=True, eq=False)
class _Part:
    """Sections whose lives meet no others, while they are being placed.

    Attributes:
        sections: The range of sections.
        known: Sections of it that hold lives.
        life: The lives of each known section, one section after the other.
        starts: Where each known section starts in them.
    """

    sections: tuple[int, int]
    known: Ints
    life: Ints
    starts: Ints


@dataclass(frozen=True, eq=False)
class _State:
    """What remains to be placed in a part.

    Attributes:
        lowest: The lowest offset possible for each life, shape ``(lives,)``; _PLACED for placed ones and those of
            other parts.
        total: Bytes still to be placed in each section.
        crossing: Lives still to be placed that are in both a section and the next.
        last: The last life placed, and its offset: the next is not below, nor before it at the same offset.
    """

    lowest: Ints
    total: Ints
    crossing: Ints
    last: tuple[int, int] = (0, -1)


@dataclass(eq=False)
class _Waiting:
    """Parts to be placed after the current one, as a linked list.

    Attributes:
        sections: The range of sections.
        state: Its state.
        home: Depth of the node whose choice divided the parts: the one to return to if this part does not fit.
        after: The next.
    """

    sections: tuple[int, int]
    state: _State
    home: int
    after: _Waiting | None


@dataclass(eq=False)
class _Node:
    """A choice of the next life to place.

    Attributes:
        part: The part.
        state: What remains of it.
        choices: Lives that may be next and their offsets, the preferred one last.
        is_first: Whether it is the first node of its part.
        home: As in _Waiting.
        waiting: The parts that follow.
    """

    part: _Part
    state: _State
    choices: list[tuple[int, int]]
    is_first: bool
    home: int
    waiting: _Waiting | None


def pack(lives: Sections, height: int, *, nodes: int, deadline: float) -> Ints | None:
    """Searches for offsets at which no two lives overlap and none ends above a height.

    Args:
        lives: The lives; of equal offsets the first in this order is tried first.
        height: Bytes.
        nodes: Number of placements after which the search stops.
        deadline: ``time.monotonic`` value at which it stops.

    Returns:
        The offset of each, shape ``(lives,)``; None where it is proved that there are none.

    Raises:
        LimitReachedError: No nodes or no time is left.
    """
    return _Search(lives, height, nodes, deadline).run()


class _Search:
    """The state of ``pack``."""

    def __init__(self, lives: Sections, height: int, nodes: int, deadline: float) -> None:
        self.lives = lives
        self.height = height
        self.nodes_left = nodes
        self.deadline = deadline
        self.offset = np.zeros(len(lives), dtype=np.int64)
        self.members, self.starts = lives.members()
        self.stack: list[_Node] = []

    def run(self) -> Ints | None:
        """Returns the offsets; None where there are none."""
        lives = self.lives
        if lives.total().max(initial=0) > self.height:
            return None
        state = _State(np.zeros(len(lives), dtype=np.int64), lives.total(), lives.crossing())
        if self._enter_waiting(self._divide((0, lives.count), state, home=-1, after=None)):
            return self.offset
        while self.stack:
            node = self.stack[-1]
            if not node.choices:
                del self.stack[node.home + 1 if node.is_first else -1 :]
            elif self._place(node, *node.choices.pop()):
                return self.offset
        return None

    def _place(self, node: _Node, life: int, offset: int) -> bool:
        """Places a life and goes on to the next; returns whether none is left."""
        state, part, lives = node.state, node.part, self.lives
        first, end, size = int(lives.first[life]), int(lives.end[life]), int(lives.size[life])
        lowest = state.lowest.copy()
        lowest[life] = _PLACED
        is_above = (lives.first < end) & (lives.end > first) & (lowest < _PLACED)
        if not is_above.any():
            node.choices.clear()  # Nothing goes on top of it, so that no other choice is better.
        lowest[is_above] = np.maximum(lowest[is_above], offset + size)
        total = state.total.copy()
        total[first:end] -= size
        floor = np.minimum.reduceat(lowest[part.life], part.starts)
        needed = np.maximum(floor, offset) + total[part.known]
        if needed[floor < _PLACED].max(initial=0) > self.height:
            return False
        self.offset[life] = offset
        crossing = state.crossing
        inner = slice(first, end - 1)
        if end - first > 1:
            crossing = crossing.copy()
            crossing[inner] -= 1
        after = _State(lowest, total, crossing, (offset, life))
        if crossing[inner].all():
            return self._enter(part, after, is_first=False, home=node.home, waiting=node.waiting)
        return self._enter_waiting(self._divide(part.sections, after, home=len(self.stack) - 1, after=node.waiting))

    def _enter_waiting(self, waiting: _Waiting | None) -> bool:
        """Goes on to the next part; returns whether there is none."""
        if waiting is None:
            return True
        part = self._part(waiting.sections, waiting.state)
        return self._enter(part, waiting.state, is_first=True, home=waiting.home, waiting=waiting.after)

    def _enter(self, part: _Part, state: _State, *, is_first: bool, home: int, waiting: _Waiting | None) -> bool:
        """Adds a node with what may be placed next; returns whether nothing is left to be placed."""
        self.nodes_left -= 1
        if self.nodes_left < 0 or (self.nodes_left % _NODES_PER_LOOK == 0 and time.monotonic() >= self.deadline):
            raise LimitReachedError
        least_end = int((state.lowest + self.lives.size).min())
        if least_end >= _PLACED:
            return self._enter_waiting(waiting)
        # Offsets only grow: one above this leaves too little for some section.
        most = self.height - int(state.total[part.known].max())
        offset, last = state.last
        may = np.flatnonzero((state.lowest >= offset) & (state.lowest < min(least_end, most + 1)))
        may = may[(state.lowest[may] > offset) | (may > last)]
        may = may[np.argsort(state.lowest[may], kind="stable")[::-1]]
        choices = list(zip(may.tolist(), state.lowest[may].tolist(), strict=True))
        self.stack.append(_Node(part, state, choices, is_first, home, waiting))
        return False

    def _divide(self, sections: tuple[int, int], state: _State, home: int, after: _Waiting | None) -> _Waiting | None:
        """Divides sections where no life crosses; returns the parts, fewest lives first, followed by others."""
        start, end = sections
        cuts = (start + 1 + np.flatnonzero(state.crossing[start : end - 1] == 0)).tolist()
        is_left: Bools = state.lowest < _PLACED
        parts = []
        for low, high in zip([start, *cuts], [*cuts, end], strict=True):
            inside = is_left & (self.lives.first >= low) & (self.lives.end <= high)
            if inside.any():
                lowest = np.where(inside, state.lowest, _PLACED)
                parts.append((int(inside.sum()), low, high, _State(lowest, state.total, state.crossing)))
        for _, low, high, own in sorted(parts, key=lambda part: -part[0]):
            after = _Waiting((low, high), own, home, after)
        return after

    def _part(self, sections: tuple[int, int], state: _State) -> _Part:
        """Collects the lives of each section, without most of those that are placed."""
        low, high = sections
        life = self.members[self.starts[low] : self.starts[high]]
        starts = self.starts[low:high] - self.starts[low]
        is_left = state.lowest[life] < _PLACED
        if np.count_nonzero(is_left) >= _WORTH_KEEPING * len(life):
            return _Part(sections, np.arange(low, high), life, starts)
        known = np.flatnonzero(np.add.reduceat(is_left.astype(np.int64), starts))
        before: Ints = np.cumsum(is_left) - is_left
        return _Part(sections, known + low, life[is_left], before[starts[known]])
