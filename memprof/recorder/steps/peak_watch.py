"""Watches the peak counter after the window, to find steps that need more memory than every recorded one."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from memprof.recorder.calls.stacks import NOT_OF_JOB
from memprof.recorder.clock import clock_ns

resource: Any = None
with contextlib.suppress(ImportError):  # Windows
    import resource

_cuda: Any = torch.cuda  # not annotated in torch

#: What runs from the first call of a model with gradients on until an update, and between an update and the next call.
TRAINING, BETWEEN = "forward or backward", "other"
#: A reading is followed by so many times its own time without one: at most 0.2 % of a run is spent here.
_REST = 500
#: A device's counter is exact. Resident memory also has what Python and the C library keep.
_DEVICE_SHARE, _HOST_SHARE, _LEAST_BYTES = 0.002, 0.05, 16 * 2**20
#: A peak is written at once, since the job may be killed; the next one if its excess is larger by this share.
_NEWS_SHARE = 0.02
#: A reading takes some 5 µs, on several devices more.
_MOST_COST_NS = 100_000
_HOST = "cpu"
#: Bytes in a unit of the system's counter.
_UNIT = 1 if sys.platform == "darwin" else 1024


class PeakWatch:
    """Reads the allocator's peak counter of each CUDA device; without one, the peak of the process's resident memory.

    Both only rise, and neither is reset: a peak between two readings is not missed, only its place is less exact.

    Attributes:
        phase: What the job does now.
    """

    def __init__(self) -> None:
        """Watches nothing before `restart`."""
        self._window: dict[str, int] = {}
        self._known: dict[str, int] = {}
        self._next_ns, self._cost_ns = 0, _MOST_COST_NS
        self.phase, self._passed, self._line = BETWEEN, [BETWEEN], ""
        self._excess_bytes = 0

    def restart(self) -> None:
        """Takes the counters as they are for those of the recorded steps."""
        self._window = self._known = _read_counters()
        self._passed, self.phase = [BETWEEN], BETWEEN
        self._line, self._next_ns = "", 0

    def look(self, step: int, phase: str) -> dict[str, Any] | None:
        """Reads the counters if that is due.

        Args:
            step: The step in which the job is.
            phase: What begins here.

        Returns:
            The highest peak so far, if it is a new one: it is to be written now.
        """
        news = None
        begin_ns = clock_ns()
        if begin_ns >= self._next_ns:
            frame = _frame_of_job(sys._getframe(1))
            now = _read_counters()
            if now != self._known:
                news = self._compare(step, now)
            self._line = "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            self._passed = []
            end_ns = clock_ns()
            self._cost_ns = min(self._cost_ns, end_ns - begin_ns)  # others may run within
            self._next_ns = end_ns + _REST * self._cost_ns
        self.phase = phase
        if phase not in self._passed:
            self._passed.append(phase)
        return news

    def _compare(self, step: int, now: dict[str, int]) -> dict[str, Any] | None:
        found, self._known = None, now
        for device, peak_bytes in now.items():
            window_bytes = self._window.get(device, 0)
            share, least = (_HOST_SHARE, _LEAST_BYTES) if device == _HOST else (_DEVICE_SHARE, 1)
            excess_bytes = peak_bytes - window_bytes
            if excess_bytes >= max(share * window_bytes, least, (1 + _NEWS_SHARE) * self._excess_bytes):
                self._excess_bytes = excess_bytes
                found = {
                    "step": step,
                    "phase": self._passed[0] if len(self._passed) == 1 else "",
                    "line": self._line,
                    "device": device,
                    "window_bytes": window_bytes,
                    "peak_bytes": peak_bytes,
                }
        return found


def _read_counters() -> dict[str, int]:
    """Returns the peak of each CUDA device that torch has allocated on; without one, that of resident memory."""
    if _cuda.is_initialized():
        found = {}
        for number in range(_cuda.device_count()):
            stats = _cuda.memory_stats_as_nested_dict(number)
            if peak_bytes := stats.get("allocated_bytes", {}).get("all", {}).get("peak", 0):
                found[f"cuda:{number}"] = int(peak_bytes)
        if found:
            return found
    return {} if resource is None else {_HOST: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT}


def _frame_of_job(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith(NOT_OF_JOB):
        frame = frame.f_back
    return frame
