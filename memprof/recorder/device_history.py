"""The device allocator's own history while operators are recorded, as plain rows.

It is what a device's events are built from; the profiler's reports (`recorder.profiler.native`) add block sizes and
nanoseconds. Recorded without stacks: those come from the operators. Semi-private, therefore feature-tested.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from memprof.recorder.clock import clock_ns
from memprof.recorder.log import RawLog
from memprof.trace.schema import ACTIONS

_cuda: Any = torch.cuda  # not annotated in torch
_NOT_OURS = "the job records the allocator's history itself: its settings were not changed"
_CODES = {action: code for code, action in enumerate(ACTIONS)}
#: States of blocks in use; the last two are the same state in different versions of torch.
_IN_USE = ("active_allocated", "active_pending_free", "active_awaiting_free")
_DEFAULT_POOL = (0, 0)


class AllocatorHistory:
    """Records the history of the CUDA allocator (and ROCm's, which has the same name) while it runs."""

    def __init__(self, log: RawLog) -> None:
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


def history_rows(
    entries: Iterable[dict[str, Any]], device: int, pools: dict[tuple[int, int], int]
) -> Iterator[tuple[int, ...]]:
    """Yields rows of the spool's ``history`` stream.

    Args:
        entries: The history of one device, in order.
        device: Number of the device.
        pools: Numbers of memory pools seen so far, 0 for the default one; new ones are added.
    """
    for entry in entries:
        action = _CODES.get(entry["action"])
        if action is None:
            continue  # from a newer torch
        address = entry.get("addr", entry.get("device_free", 0))
        yield (
            int(entry.get("time_us", -1)),
            device,
            action,
            address,
            entry.get("size", 0),
            entry.get("stream", 0),
            _pool_number(entry.get("pool_id"), pools),
        )


def block_rows(segments: Iterable[dict[str, Any]]) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Yields the blocks in use: device index, address, bytes, bytes requested, stream, and 1 if pending on a stream."""
    for segment in segments:
        position = segment["address"]
        for block in segment["blocks"]:
            size = block["size"]
            position = block.get("address", position)
            state = block["state"]
            if state in _IN_USE:
                yield (
                    segment["device"],
                    position,
                    size,
                    block.get("requested_size", size),
                    segment["stream"],
                    int(state != _IN_USE[0]),
                )
            position += size


def segment_records(segments: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the segments without their blocks, JSON-serializable."""
    return [
        {
            "device": segment["device"],
            "address": segment["address"],
            "total_size": segment["total_size"],
            "allocated_size": segment["allocated_size"],
            "active_size": segment["active_size"],
            "requested_size": segment.get("requested_size", segment["allocated_size"]),
            "stream": segment["stream"],
            "type": segment["segment_type"],
            "pool": list(segment.get("segment_pool_id", _DEFAULT_POOL)),
            "is_expandable": bool(segment.get("is_expandable", False)),
        }
        for segment in segments
    ]


def _pool_number(pool: Any, pools: dict[tuple[int, int], int]) -> int:
    if pool is None:
        return 0
    pools.setdefault(_DEFAULT_POOL, 0)
    return pools.setdefault(tuple(pool), len(pools))
