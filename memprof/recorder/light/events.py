"""Records the CPU allocations of a stretch of the run, and the backward nodes around them, without running Python.

torch's C++ profiler records both in about 0.1 µs each, and takes about 5 µs for each when read out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C import _profiler

from memprof.recorder.clock import clock_ns
from memprof.recorder.light.log import LightLog
from memprof.recorder.profiler.sessions import ProfilerSession
from memprof.trace.files.spool import HEARD

_Allocation: Any = getattr(_profiler, "_ExtraFields_Allocation", ())
_NODE: Any = getattr(_profiler, "_ExtraFields_TorchOp", ())

#: Called with the time, the allocator's count, and the number of the running backward node, -1 outside backward.
OnCount = Callable[[int, int, int], None]


class LightEvents:
    """Allocations and backward nodes of the thread that started it."""

    def __init__(self, log: LightLog, on_count: OnCount) -> None:
        """Stores the recorder's log.

        Args:
            log: Destination of the rows.
            on_count: Called for every allocation, in order, when the session is read out.
        """
        self._log = log
        self._on_count = on_count
        self._session = ProfilerSession()

    @property
    def is_running(self) -> bool:
        """Whether a session is running."""
        return self._session.is_running

    @staticmethod
    def is_available() -> bool:
        """Whether this torch has the fields read here."""
        return all(
            hasattr(owner, name)
            for owner, names in (
                (_Allocation, ("ptr", "alloc_size", "total_allocated", "device")),
                (_NODE, ("sequence_number",)),
            )
            for name in names
        )

    def start(self) -> bool:
        """Starts recording; returns False, leaving it alone, if the job's own profiler is warming up or running."""
        # Backward nodes only: a session must never end inside a scope whose begin it recorded, and it never ends
        # inside backward.
        return self._session.start(_profiler.RecordScope.BACKWARD_FUNCTION, profile_memory=True)

    def cut(self) -> int:
        """Logs the events so far and continues; returns their number. Never call inside backward."""
        count = self.stop()
        self.start()
        return count

    def stop(self) -> int:
        """Logs the events and stops; returns their number."""
        result = self._session.stop()
        if result is None:
            return 0
        events, nodes, on_count, names = self._log.events, self._log.nodes, self._on_count, self._log.intern
        before = len(events)
        # Each entry: event, and the number of its enclosing node. The last is next.
        pending = [(event, -1) for event in reversed(result.experimental_event_tree())]
        while pending:
            event, node = pending.pop()
            fields: Any = event.extra_fields  # one of many types, given by `type`
            if type(fields) is _Allocation:
                if fields.device.type == "cpu":
                    moment, total = event.start_time_ns, fields.total_allocated
                    events.extend((moment, fields.ptr, fields.alloc_size, total))
                    on_count(moment, total, node)
                continue
            if type(fields) is _NODE:
                node = fields.sequence_number
                nodes.extend((event.start_time_ns, event.end_time_ns, node, names("names", event.name)))
            pending.extend((child, node) for child in reversed(event.children))
        events.extend((clock_ns(), *HEARD))
        return (len(events) - before) // 4 - 1

    def abandon(self) -> None:
        """Drops the session without reading it out; inside backward, as soon as that is over."""
        self._session.abandon()
