"""The device allocator's own history while operators are recorded: addresses, requested sizes, streams, segments.

It is what a device's events are built from; the profiler's reports (`recorder.profiler.native`) add block sizes and
nanoseconds. Recorded without stacks: those come from the operators. Semi-private, therefore feature-tested.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from memprof.recorder.clock import clock_ns
from memprof.recorder.device.snapshot import block_rows, history_rows, segment_records
from memprof.recorder.log import RawLog

_cuda: Any = torch.cuda  # not annotated in torch
_NOT_OURS = "the job records the allocator's history itself: its settings were not changed"


class AllocatorHistory:
    """Records the history of the CUDA allocator (and ROCm's, which has the same name) while it runs."""

    def __init__(self, log: RawLog) -> None:
        """Stores the recorder's log."""
        self._log = log
        self._is_ours = False
        self._last: dict[int, tuple[Any, ...]] = {}  # last logged entry of each device
        self._pools: dict[tuple[int, int], int] = {}
        self.is_running = False

    @staticmethod
    def is_available() -> bool:
        """Whether a CUDA allocator with a history is in use; never initializes CUDA."""
        return (
            hasattr(torch._C, "_cuda_record_memory_history")
            and hasattr(torch._C, "_cuda_memorySnapshot")
            and _cuda.is_initialized()
            and _cuda.get_allocator_backend() == "native"
        )

    def start(self) -> bool:
        """Starts the history and logs the blocks in use; returns False if no history is available."""
        if self.is_running or not self.is_available():
            return self.is_running
        is_jobs_own = getattr(torch._C, "_cuda_isHistoryEnabled", lambda: False)()
        self._is_ours = not is_jobs_own
        if self._is_ours:
            self._clear()
        else:
            self._log.record("notes", _NOT_OURS)
        snapshot = torch.cuda.memory._snapshot()
        self._last = {place: _key(trace[-1]) for place, trace in enumerate(snapshot["device_traces"]) if trace}
        now = clock_ns()
        for device, *block in block_rows(snapshot["segments"]):
            self._log.device_alive.extend((now, self._number(device), *block))
        self.is_running = True
        return True

    def cut(self) -> None:
        """Logs the events since the last cut, and continues."""
        if self.is_running:
            self._log_entries(torch.cuda.memory._snapshot())
            if self._is_ours:
                self._clear()
                self._last.clear()

    def stop(self) -> None:
        """Logs the events since the last cut and the current segments, and stops."""
        if not self.is_running:
            return
        snapshot = torch.cuda.memory._snapshot()
        self._log_entries(snapshot)
        self._log.record("segments", {"time_ns": clock_ns(), "segments": segment_records(snapshot["segments"])})
        self.abandon()

    def abandon(self) -> None:
        """Stops without logging."""
        if self.is_running:
            self.is_running = False
            if self._is_ours:
                torch.cuda.memory._record_memory_history(None)

    def _clear(self) -> None:
        """Enables an empty history; a torch that cannot clear it is restarted by disabling it first."""
        settings: dict[str, Any] = {"context": None, "stacks": "python", "max_entries": sys.maxsize}
        try:
            torch.cuda.memory._record_memory_history("all", clear_history=True, **settings)
        except TypeError:
            torch.cuda.memory._record_memory_history(None)
            torch.cuda.memory._record_memory_history("all", **settings)

    def _log_entries(self, snapshot: Any) -> None:
        for place, trace in enumerate(snapshot["device_traces"]):
            fresh = fresh_entries(trace, self._last.get(place))
            if fresh:
                self._last[place] = _key(fresh[-1])
                for row in history_rows(fresh, self._number(place), self._pools):
                    self._log.history.extend(row)

    def _number(self, device: int) -> int:
        return self._log.intern("devices", f"cuda:{device}")


def fresh_entries(trace: list[dict[str, Any]], last: tuple[Any, ...] | None) -> list[dict[str, Any]]:
    """Returns the entries of a history after the last one seen; all of them if that one is gone.

    A history kept by the job may contain only the latest entries, so their count does not help.
    """
    if last is None:
        return trace
    for place in range(len(trace) - 1, -1, -1):
        if _key(trace[place]) == last:
            return trace[place + 1 :]
    return trace


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry["action"], entry.get("addr"), entry.get("size"), entry.get("time_us")
