"""Determines each operator's memory need while it runs, from its estimate and its properties.

One session of torch's profiler runs at a time. While a recorder's session is active, the kernel's allocations are
read from it when it ends or is cut; the estimate is used until then.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left, bisect_right
from typing import Any

import torch
from torch._C import _profiler

from memprof.policies.remat.cells import Need
from memprof.policies.remat.counters import Counter
from memprof.recorder.calls.dispatch_modes import is_higher_order, map_tensors, tensors_in
from memprof.recorder.profiler.native import NativeEvents, allocations, highest_of, in_time
from memprof.recorder.profiler.profiler_guard import ProfilerGuard
from memprof.recorder.profiler.sessions import may_start, short_session
from memprof.trace.operator_facts import (
    COLLECTIVE_SPACES,
    MOVES_MEMORY,
    RUNNING_STATISTICS,
    WORKSPACE_WORDS,
    is_view,
    written_arguments,
)

_Tensor = torch.Tensor
_now_ns, _wall_ns = time.perf_counter_ns, time.time_ns
#: Maximum offset of the profiler's clock from the system's.
_CLOCK_SLACK_NS = 3_000


class Needs:
    """Bytes needed by operators while they run, by operator and by the inputs' shapes, types and strides."""

    def __init__(self, counter: Counter, device: torch.device) -> None:
        self._counter = counter
        self._device = device
        self._has_native_events = NativeEvents.is_available() and device.type == "cpu"
        self._awaited: list[tuple[Need, int, int, int]] = []  # need, begin, end, and bytes kept of each run
        self._listener = self._read_events
        self._guard = ProfilerGuard()

    def estimate_bytes(self, function: Any, args: Any, kwargs: Any) -> int:
        """Estimates a run's bytes: its outputs from shape inference, and workspace for kernels known to use it."""
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.device == self._device]
        input_bytes = sum(tensor.untyped_storage().nbytes() for tensor in inputs if tensor.layout is torch.strided)
        output_bytes = _output_bytes(function, args, kwargs)
        if output_bytes < 0:
            output_bytes = 2 * input_bytes
        return output_bytes + (input_bytes + output_bytes if _needs_workspace(function) else 0)

    def begin(self) -> None:
        """Starts reading recorders' allocation events."""
        self._guard.install()
        NativeEvents.listeners.append(self._listener)

    def end(self) -> None:
        """Stops reading them."""
        self._guard.remove()
        NativeEvents.listeners.remove(self._listener)

    def must_measure(self, need: Need) -> bool:
        """Returns whether a kernel's next run must be measured because its need is unknown."""
        return need.highest_bytes < 0 or (not need.is_awaited and may_start())

    def learn(self, need: Need, guess_bytes: int, function: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        """Runs an operator and measures its kernel's memory; the estimate stands if that comes later, or never.

        Args:
            need: Receives the measurement.
            guess_bytes: Result of ``estimate_bytes``.
            function: The operator.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            The result, and the duration in microseconds.
        """
        before = self._counter.used_bytes()
        with short_session() as session:
            # A scope that no training job enters: the session neither records nor outlives one of the job's.
            scope = _profiler.RecordScope.LITE_INTERPRETER
            need.is_measured = self._has_native_events and session.start(scope, profile_memory=True)
            if need.is_measured:
                start = _now_ns()
                result = function(*args, **kwargs)
                took_ns = _now_ns() - start
                highest, _ = highest_of(in_time(allocations(session.stop())))
        if not need.is_measured:
            start, start_wall = _now_ns(), _wall_ns()
            result = function(*args, **kwargs)
            took_ns, end_wall = _now_ns() - start, _wall_ns()
            kept = self._counter.used_bytes() - before
            needs_workspace = _needs_workspace(function)
            highest = max(guess_bytes + guess_bytes // 2, kept + kept // 2) if needs_workspace else 0
            need.is_awaited = self._has_native_events
            need.is_measured = not (needs_workspace or need.is_awaited)
            if need.is_awaited:
                self._awaited.append((need, start_wall, end_wall, kept))
        need.highest_bytes = max(highest, self._counter.used_bytes() - before, 0)
        return result, took_ns / 1000

    def _read_events(self, events: array[int]) -> None:
        """Extracts the memory of awaited kernels from a recorder's events."""
        awaited, self._awaited = self._awaited, []
        if not awaited:
            return
        own = in_time(events)
        times = [time_ns for time_ns, _ in own]
        for need, start, end, kept in awaited:
            need.is_awaited = False
            first, last = bisect_left(times, start - _CLOCK_SLACK_NS), bisect_right(times, end + _CLOCK_SLACK_NS)
            highest, left = highest_of(own[first:last])
            # If the events include more than the kernel's own, the next run is measured instead.
            if left == kept:
                need.highest_bytes, need.is_measured = highest, True


def _needs_workspace(function: Any) -> bool:
    return any(part in str(function) for part in WORKSPACE_WORDS)


def _output_bytes(function: Any, args: Any, kwargs: Any) -> int:
    """Returns the bytes of an operator's new outputs by shape inference; -1 if it has none."""
    if not tensors_in((args, kwargs)) and kwargs.get("device") is None:
        return -1  # it cannot be run without memory: it would really run, and repeat its side effects
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        try:
            shadows = [_shadow(value) for value in args], {name: _shadow(value) for name, value in kwargs.items()}
            result = function(*shadows[0], **shadows[1])
            given = {tensor.untyped_storage()._cdata for tensor in tensors_in(shadows[0])}
            made = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors_in(result)}
        except (RuntimeError, TypeError, ValueError, AssertionError, IndexError, AttributeError):
            return -1  # the operator has no shape function, or reads values
        return sum(size for address, size in made.items() if address not in given)


def _shadow(value: Any) -> Any:
    return torch.device("meta") if isinstance(value, torch.device) else map_tensors(_without_memory, value)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class Operator:
    """One overload of an operator.

    Attributes:
        function: The operator.
        name: Its name in recordings.
        is_view: Whether it allocates nothing: it returns views of its arguments, or marks a region for profilers.
        written: Positions of the arguments that it writes.
        written_names: Names of its written keyword arguments.
        changes: Position of the one tensor that it changes in place and returns; -1 for other operators.
        is_random: Whether it draws random numbers.
        statistics: Positions of running statistics, and of the argument that says whether they are updated.
        can_repeat: Whether its outputs can be recomputed by running it again.
        is_higher_order: Whether it runs functions rather than only operating on tensors.
    """

    __slots__ = (
        "can_repeat",
        "changes",
        "function",
        "is_higher_order",
        "is_random",
        "is_view",
        "name",
        "statistics",
        "written",
        "written_names",
    )

    def __init__(self, function: Any) -> None:
        self.function = function
        self.name = str(function)
        self.is_higher_order = is_higher_order(function)
        schema = getattr(function, "_schema", None)
        writes = written_arguments(schema)
        self.written = tuple(i for i, a in writes if not a.kwarg_only)
        self.written_names = tuple(a.name for _, a in writes)
        returns = schema.returns if schema is not None else []
        self.is_random = torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())
        packet = getattr(getattr(function, "overloadpacket", None), "__name__", "")
        namespace = getattr(function, "namespace", "")
        # The end of a region also runs while an error passes through it, which another error must not replace.
        self.is_view = is_view(schema) or namespace == "profiler"
        self.statistics = RUNNING_STATISTICS.get(packet) if namespace == "aten" else None
        is_in_place = (
            len(writes) == 1
            and not writes[0][1].kwarg_only
            and len(returns) == 1
            and str(writes[0][1].type) == "Tensor"
            and packet not in MOVES_MEMORY
        )
        self.changes = writes[0][0] if is_in_place else -1
        self.can_repeat = (
            schema is not None
            and (not writes or is_in_place or self.statistics is not None)
            and namespace not in COLLECTIVE_SPACES
            and packet not in MOVES_MEMORY
        )

    def moves_statistics(self, args: tuple[Any, ...]) -> bool:
        """Returns whether a call updates running statistics."""
        if self.statistics is None:
            return False
        flag = self.statistics[2]
        return flag is None or (len(args) > flag and bool(args[flag]))
