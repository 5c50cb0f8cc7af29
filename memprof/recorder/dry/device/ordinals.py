"""Which of its machine's devices a process of a dry run uses: only that one is simulated, the others are counted."""

from __future__ import annotations

from typing import Any

import torch


class Ordinals:
    """The devices of a machine, of which the process uses one: the first that it selects by index, or else 0.

    Attributes:
        count: How many devices the machine has.
        index: The one whose memory is simulated.
        is_fixed: Whether it has had memory in use; from then on, every index refers to it.
    """

    def __init__(self) -> None:
        """Starts with a machine of one device."""
        self.count = 1
        self.index = 0
        self.is_fixed = False

    def check(self, device: Any) -> None:
        """Raises CUDA's error for a device beyond the last.

        Args:
            device: An index, or a device in any form that torch accepts; without an index it is the current one.

        Raises:
            RuntimeError: There is no such device.
        """
        self._checked_index(device)

    def use(self, device: Any) -> None:
        """Makes a device the one that is simulated, unless another is in use.

        Raises:
            RuntimeError: There is no such device.
        """
        index = self._checked_index(device)
        if index is not None and index >= 0 and not self.is_fixed:
            self.index = index

    def current(self) -> torch.device:
        """Returns the simulated device as Python sees it."""
        return torch.device("cuda", self.index)

    def _checked_index(self, device: Any) -> int | None:
        index: int | None = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= self.count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return index


#: The devices of this process's machine.
ORDINALS = Ordinals()
