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
#: A peak is written at once, since the job may be killed; the next one if it is above it by this share of its excess.
_NEWS_SHARE = 0.02
_HOST = "cpu"
#: Bytes in a unit of the system's counter.
_UNIT = 1 if sys.platform == "darwin" else 1024


class PeakWatch:
    """Reads the allocator's peak counter of each CUDA device; without one, the peak of the process's resident memory.

    It resets neither, so a peak between two readings is not missed, only its place is less exact. Where the job itself
    resets a device's counter, all that it shows from then on is new; the report compares it with the recorded steps.

    Attributes:
        phase: What the job does now.
    """

    def __init__(self) -> None:
        """Watches nothing before `restart`."""
        self._window: dict[str, int] = {}
        self._known: dict[str, int] = {}
        self._written: dict[str, int] = {}
        self._next_ns, self._cost_ns = 0, sys.maxsize
        self._begin(0, BETWEEN, "")

    def restart(self, step: int) -> None:
        """Takes the counters as they are for those of the recorded steps; the job is in this step."""
        _, self._window = self._read()
        self._known, self._next_ns = dict(self._window), 0
        self._begin(step, BETWEEN, "")

    def look(self, step: int, phase: str, *, at_once: bool = False) -> list[dict[str, Any]]:
        """Reads the counters if that is due.

        Args:
            step: The step in which the job is from here on.
            phase: What begins here.
            at_once: A reading is due in any case.

        Returns:
            The highest peak so far of each device that has a new one: they are to be written now.
        """
        if at_once or clock_ns() >= self._next_ns:
            line, now = self._read()
            news = self._compare(now) if now != self._known else []
            self._begin(step, phase, line)
            return news
        self.phase, self._last_step = phase, step
        if phase not in self._passed:
            self._passed.append(phase)
        return []

    def _begin(self, step: int, phase: str, line: str) -> None:
        self.phase, self._passed, self._line = phase, [phase], line
        self._first_step = self._last_step = step

    def _read(self) -> tuple[str, dict[str, int]]:
        """Returns the job's line and the counters, and schedules the next reading by the least time that one took."""
        begin_ns = clock_ns()
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(NOT_OF_JOB):
            frame = frame.f_back
        line = "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        now = _read_counters()
        self._cost_ns = min(self._cost_ns, clock_ns() - begin_ns)  # others may run within
        self._next_ns = clock_ns() + _REST * self._cost_ns
        return line, now

    def _compare(self, now: dict[str, int]) -> list[dict[str, Any]]:
        found, before, self._known = [], self._known, now
        place = {
            "step": self._first_step,
            "steps": self._last_step - self._first_step + 1,
            "phase": self._passed[0] if len(self._passed) == 1 else "",
            "line": self._line,
        }
        for device, peak_bytes in now.items():
            if peak_bytes < before.get(device, 0):
                self._window[device] = 0  # the job has reset it
            window_bytes = self._window.get(device, 0)
            share, least = (_HOST_SHARE, _LEAST_BYTES) if device == _HOST else (_DEVICE_SHARE, 1)
            excess_bytes = peak_bytes - window_bytes
            news_bytes = peak_bytes - self._written.get(device, 0)
            if excess_bytes >= max(share * window_bytes, least) and news_bytes >= _NEWS_SHARE * excess_bytes:
                self._written[device] = peak_bytes
                found.append({**place, "device": device, "window_bytes": window_bytes, "peak_bytes": peak_bytes})
        return found


def _read_counters() -> dict[str, int]:
    """Returns the peak of each CUDA device that torch has allocated on; without one, that of resident memory."""
    found = {}
    with contextlib.suppress(RuntimeError):  # the job's own allocator (CUDAPluggableAllocator) has no counters
        for number in range(_cuda.device_count() if _cuda.is_initialized() else 0):
            stats = _cuda.memory_stats_as_nested_dict(number)
            if peak_bytes := stats.get("allocated_bytes", {}).get("all", {}).get("peak", 0):
                found[f"cuda:{number}"] = int(peak_bytes)
    return found or ({} if resource is None else {_HOST: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT})
