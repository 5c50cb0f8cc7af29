"""Follows what a rank does in its dry run, to find ranks that do the same."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memprof.trace.files.rank_roles import RankRole

#: Results up to this size are not compared: one rank may log a loss.
_LEAST_BYTES = 512
_LISTS = (list, tuple)


class Role:
    """The role of this process so far.

    Attributes:
        rank: Its global rank.
        world_size: Ranks of the job; 0 until it creates its process group.
    """

    def __init__(self) -> None:
        """Starts with no operators and no process group."""
        self.rank = 0
        self.world_size = 0
        self._groups: dict[tuple[int, ...], None] = {}
        self._peers: set[int] = set()
        self._digest = 0

    def join(self, rank: int, world_size: int) -> None:
        """Notes that the job created its process group."""
        self.rank, self.world_size = rank, world_size

    def note_group(self, ranks: Sequence[int]) -> None:
        """Notes a process group, of which this rank may not be a member."""
        self._groups[tuple(sorted(ranks))] = None

    def note_peer(self, rank: int) -> None:
        """Notes that a tensor was sent to a rank, or received from it."""
        self._peers.add(rank)

    def note_operator(self, func: Any, result: Any) -> None:
        """Notes an operator's name and the size of its result."""
        size = _size(result)
        if size > _LEAST_BYTES:
            self._digest = zlib.crc32(f"{func} {size}".encode(), self._digest)

    def write(self, spool: Path) -> None:
        """Writes the role into the spool folder, for the parent.

        Raises:
            OSError: It cannot be written.
        """
        groups = [list(group) for group in self._groups]
        RankRole(self.rank, self.world_size, groups, sorted(self._peers), self._digest).write(spool)


def _size(result: Any) -> int:
    if isinstance(result, FakeTensor):
        return result.nbytes if result.layout is torch.strided else 0
    return sum(map(_size, result)) if isinstance(result, _LISTS) else 0
