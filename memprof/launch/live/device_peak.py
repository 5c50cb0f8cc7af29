"""Watches the peak in a device's own counter, at no cost."""

from __future__ import annotations

import torch

#: The peak is reported again once it has grown by this fraction since the last report.
_GROWTH = 0.05


class DevicePeak:
    """Peak bytes allocated by PyTorch on a CUDA device since the watch began.

    The counter is torch.cuda.max_memory_allocated; it is reset once, when the watch begins.
    """

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        """Resets the counter.

        Args:
            device: A CUDA device.
            limit_bytes: Expected peak.
        """
        self._device = device
        self._limit_bytes = limit_bytes
        torch.cuda.reset_peak_memory_stats(device)

    def exceeded(self) -> int:
        """Returns the peak if it exceeds the expected one, or has grown further since the last report; 0 otherwise."""
        peak = torch.cuda.max_memory_allocated(self._device)
        if peak <= self._limit_bytes:
            return 0
        self._limit_bytes = int(peak * (1 + _GROWTH))
        return peak
