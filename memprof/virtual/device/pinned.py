"""Pinned host memory in a dry run: the blocks that torch's allocator would take for it, by line."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from memprof.recorder.steps.loaders import frames_of
from memprof.replay.rounding import pinned_limits, rounded_when_pinned

#: In the stack of what a DataLoader pins: how many of its batches are pinned at once is a matter of time.
_OF_LOADER = "torch/utils/data/"
_Key = tuple[tuple[str, ...], int, int]


class PinnedMemory:
    """Follows what the job pins. A freed block serves the next request of its size, as if copies had ended by then.

    Attributes:
        total_bytes: Bytes of all blocks, in use or cached.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        """Starts without any.

        Args:
            options: Options of the allocator, as in ``PYTORCH_ALLOC_CONF``.
        """
        self.total_bytes = 0
        self._settings = ",".join(f"{key}:{value}" for key, value in options.items())
        _, self._most_cached = pinned_limits(self._settings)
        self._held: dict[int, tuple[Any, int, _Key]] = {}
        self._free: Counter[int] = Counter()
        self._blocks: Counter[_Key] = Counter()
        self._peak: tuple[int, Counter[_Key]] = (0, Counter())
        self._lock = threading.RLock()

    def pin(self, tensor: torch.Tensor) -> None:
        """Notes that the storage of a tensor is pinned, from now until it is freed."""
        if tensor.layout is not torch.strided or not tensor.numel():
            return
        frames = tuple(frames_of(sys._getframe(1)))
        storage = tensor.untyped_storage()
        key, size = storage._cdata, tensor.numel() * tensor.element_size()
        if any(_OF_LOADER in frame for frame in frames):
            return
        with self._lock:
            if key in self._held:
                return
            block = int(rounded_when_pinned(np.array([size]), self._settings)[0])
            made: _Key = (frames, size, block)
            if self._free[block]:
                self._free[block] -= 1
            else:
                self._blocks[made] += 1
                self.total_bytes += block
                if self.total_bytes > self._peak[0]:
                    self._peak = self.total_bytes, +self._blocks
            self._held[key] = weakref.ref(storage, lambda _: self._freed(key)), block, made

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Returns whether the job pinned a tensor."""
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._held

    def needs(self) -> Iterator[dict[str, Any]]:
        """Yields a record for each line and size at the peak, in the columns of `memprof.trace.schema.HostNeeds`."""
        for (frames, size, block), count in self._peak[1].items():
            of_block = {"requested_bytes": size, "size_bytes": block}
            yield {"kind": "pinned", "frames": list(frames), "loader": -1, "count": count, "batches": 0, **of_block}

    def _freed(self, key: int) -> None:
        with self._lock:
            _, block, made = self._held.pop(key)
            if block <= self._most_cached:
                self._free[block] += 1
            else:
                self._blocks[made] -= 1
                self.total_bytes -= block
