"""Records the CPU allocations of a stretch of the run: when it may, what, and where the thread was.

torch's C++ profiler records both in about 0.1 µs each, and takes about 5 µs for each when read out.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from torch._C import _profiler

from memprof.recorder.clock import clock_ns
from memprof.recorder.light.log import LightLog
from memprof.recorder.profiler.sessions import ProfilerSession
from memprof.trace.files.spool import BACKWARD, HEARD, OTHER

_Allocation: Any = getattr(_profiler, "_ExtraFields_Allocation", ())
_NODE: Any = getattr(_profiler, "_ExtraFields_TorchOp", ())
#: Called with the time, the allocator's count, and the number of the running backward node, -1 outside backward.
OnCount = Callable[[int, int, int], None]
#: Share of the thread's processor time that counting and reading out events may take together: other load on the
#: machine, and time in which the job waits, do not add to it. Where counting takes most of it, reading out has the
#: least share.
_SHARE, _LEAST_SHARE = 0.008, 0.001
#: What counting takes for each step, for each module call, and for each allocation and free: torch's own bookkeeping.
_STEP_NS, _CALL_NS, _EVENT_NS = 40_000, 1_100, 540
#: Time for it that every run gets from the start, so that short runs have events too.
_ALLOWANCE_NS = 300_000_000
#: A stretch with more events than this is the last: reading out takes 2 kB of memory per event.
_MOST_EVENTS = 300_000
_clock_ns = time.monotonic_ns


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


class Budget:
    """Tracks the time spent.

    Attributes:
        is_over: Recording events takes too much memory in this job.
    """

    def __init__(self) -> None:
        self._start_ns = time.thread_time_ns()
        self._spent_ns = self._counting_ns = 0
        self._not_before_ns = 0
        self.is_over = False

    def may_listen(self) -> bool:
        """Whether another stretch may begin."""
        now_ns = _clock_ns()
        if self.is_over or now_ns < self._not_before_ns:
            return False
        elapsed_ns = time.thread_time_ns() - self._start_ns
        allowed_ns = _ALLOWANCE_NS + max(_LEAST_SHARE * elapsed_ns, _SHARE * elapsed_ns - self._counting_ns)
        # A thread's processor time, which takes longer to read, does not pass faster than time.
        self._not_before_ns = now_ns + max(0, int((self._spent_ns - allowed_ns) / _SHARE))
        return self._spent_ns < allowed_ns

    def count_step(self, calls: int, events: int) -> None:
        """Charges a step in which no events were recorded.

        Args:
            calls: Its module calls.
            events: Allocations and frees of a step like it.
        """
        self._counting_ns += _STEP_NS + calls * _CALL_NS + events * _EVENT_NS

    def spend(self, since_ns: int, events: int) -> None:
        """Charges the time since `since_ns` (the thread's processor time), in which `events` were read."""
        self._spent_ns += time.thread_time_ns() - since_ns
        self.is_over |= events > _MOST_EVENTS


class Marks:
    """The positions of the observed thread since a session of events began."""

    def __init__(self) -> None:
        self._ns: list[int] = []
        self._sequence: list[int] = []
        self._place: list[tuple[int, int]] = []
        self._last_node = (-1, -1)  # the mark during which a backward node ran last, and its module

    def __len__(self) -> int:
        return len(self._ns)

    def add(self, now_ns: int, sequence: int, phase: int, module: int) -> None:
        """Adds the position that the thread moves to.

        Args:
            now_ns: When it does.
            sequence: The sequence number that autograd gives the next node.
            phase: The phase.
            module: The module, -1 outside.
        """
        self._ns.append(now_ns)
        self._sequence.append(sequence)
        self._place.append((phase, module))

    def place_of(self, moment_ns: int, node: int) -> tuple[int, int]:
        """Returns the phase and the module of an event.

        Args:
            moment_ns: When it happened; events must come in the order of time.
            node: Sequence number of the backward node that ran it; negative for a node without one, -1 outside nodes.
        """
        here = max(bisect_right(self._ns, moment_ns) - 1, 0)
        phase, module = self._place[here] if self._place else (OTHER, -1)
        if node != -1 and module == -1:  # otherwise a module is recomputed inside backward
            phase = BACKWARD
            if node >= 0:
                maker = bisect_right(self._sequence, node) - 1
                module = self._place[maker][1] if maker >= 0 else -1
                self._last_node = (here, module)
        if module == -1 and self._last_node[0] == here:  # autograd's own work on the node's results
            phase, module = BACKWARD, self._last_node[1]
        return phase, module

    def clear(self) -> None:
        """Forgets all of them."""
        self._ns.clear()
        self._sequence.clear()
        self._place.clear()
        self._last_node = (-1, -1)
