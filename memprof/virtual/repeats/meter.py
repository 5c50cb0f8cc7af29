"""Live bytes of a dry run between two moments, and the operator that stands for skipped ones."""

from __future__ import annotations

from typing import Any

import torch

_library: Any = torch.library.Library("memprof", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's is not annotated
_library.define("repeated(int temporary_bytes) -> Tensor")
#: Stands for operators that are not run again; its argument is their peak beyond the live bytes before them.
REPEATED: Any = torch.ops.memprof.repeated.default


class Watch:
    """The highest live bytes since the watch began.

    Attributes:
        start_bytes: Live bytes at its start.
        high_bytes: Highest live bytes since.
    """

    def __init__(self, live_bytes: int) -> None:
        """Starts now."""
        self.start_bytes = self.high_bytes = live_bytes

    @property
    def excess_bytes(self) -> int:
        """Bytes by which the highest exceeds those at the start."""
        return self.high_bytes - self.start_bytes


class Meter:
    """Counts live bytes, relative to when it was created.

    Attributes:
        live_bytes: Live bytes now.
    """

    def __init__(self) -> None:
        """Starts with nothing alive."""
        self.live_bytes = 0
        self._watches: list[Watch] = []

    def change(self, change: int) -> None:
        """Counts an allocation, or a free if negative."""
        self.live_bytes += change
        if change > 0:
            self.pulse(0)

    def pulse(self, extra_bytes: int) -> None:
        """Counts memory that an operator takes and frees."""
        high = self.live_bytes + extra_bytes
        for watch in self._watches:
            if high > watch.high_bytes:
                watch.high_bytes = high

    def begin(self) -> Watch:
        """Returns a new watch."""
        watch = Watch(self.live_bytes)
        self._watches.append(watch)
        return watch

    def end(self, watch: Watch) -> None:
        """Ends a watch, which keeps its numbers."""
        if watch in self._watches:
            self._watches.remove(watch)
