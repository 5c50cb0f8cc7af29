"""Which of its machine's devices a process of a dry run uses: the others exist in numbers alone."""

from __future__ import annotations

from typing import Any

import torch


class Ordinals:
    """The devices of a machine, of which the process uses one: the first that it names by its index, or else 0.

    Attributes:
        count: How many devices the machine has.
        index: The one whose memory is simulated.
        is_fixed: Whether it has memory in use; from then on, others stand for it, too.
    """

    def __init__(self) -> None:
        """Starts with a machine of one device."""
        self.count = 1
        self.index = 0
        self.is_fixed = False

    def check(self, device: Any) -> None:
        """Refuses a device beyond the last, in CUDA's words.

        Args:
            device: An index, or what names a device; without an index it is the current one.

        Raises:
            RuntimeError: There is no such device.
        """
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= self.count:
            raise RuntimeError("CUDA error: invalid device ordinal")

    def use(self, device: Any) -> None:
        """Makes a device the one that is simulated, unless another is in use.

        Raises:
            RuntimeError: There is no such device.
        """
        self.check(device)
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= 0 and not self.is_fixed:
            self.index = index

    def current(self) -> torch.device:
        """Returns the simulated device as Python sees it."""
        return torch.device("cuda", self.index)


#: The devices of this process's machine.
ORDINALS = Ordinals()
