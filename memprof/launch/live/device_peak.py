"""Watches the peak that a device's own counter tells, which costs nothing."""

from __future__ import annotations

import torch

#: A peak is told again where it has grown by this share since it was told last.
_GROWTH = 0.05


class DevicePeak:
    """The most bytes that PyTorch has allocated on a CUDA device since the watch began.

    The counter is torch.cuda.max_memory_allocated; it is set back once, when the watch begins.
    """

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        """Begins to watch.

        Args:
            device: A CUDA device.
            limit_bytes: Peak that is expected.
        """
        self._device = device
        self._limit_bytes = limit_bytes
        torch.cuda.reset_peak_memory_stats(device)

    def exceeded(self) -> int:
        """Returns the peak where it is more than expected, or has grown further since it was told; 0 otherwise."""
        peak = torch.cuda.max_memory_allocated(self._device)
        if peak <= self._limit_bytes:
            return 0
        self._limit_bytes = int(peak * (1 + _GROWTH))
        return peak
