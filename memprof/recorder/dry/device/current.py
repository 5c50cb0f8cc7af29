"""Where a job of a dry run allocates: the current stream and, while a CUDA graph is captured, the graph's pool."""

from __future__ import annotations

import itertools
from typing import Any


class Current:
    """The stream and the pool of this process.

    Attributes:
        stream: Number, index and type of the current stream, as torch sets it; () for the default one.
        owner: Number of the pool of the graph being captured; 0 for the default pool.
        captures: Graphs captured so far.
        attends: The job is inside scaled_dot_product_attention's composite of other operators.
    """

    def __init__(self) -> None:
        """Starts on the default stream, without a graph."""
        self.stream: tuple[int, int, int] | tuple[()] = ()
        self.owner = 0
        self.captures = 0
        self.attends = False
        self._numbers = itertools.count(1)
        self._owners: dict[Any, int] = {}

    @property
    def is_capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self.owner != 0

    def new_pool(self) -> tuple[int, int]:
        """Returns the identifier of a new pool."""
        return 0, next(self._numbers)

    def capture_into(self, pool: tuple[int, int]) -> None:
        """Allocates from a pool until ``end_capture``.

        Args:
            pool: Its identifier.

        Raises:
            RuntimeError: A graph is being captured.
        """
        if self.is_capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.owner = self._owners.setdefault(pool, len(self._owners) + 1)
        self.captures += 1

    def end_capture(self) -> None:
        """Allocates from the default pool again.

        Raises:
            RuntimeError: No graph is being captured.
        """
        if not self.is_capturing:
            raise RuntimeError("Called CUDAGraph::capture_end without a preceding capture_begin.")
        self.owner = 0


#: Those of this process.
CURRENT = Current()
