"""Knows how many bytes each operator takes while it runs: estimated before the first run, and heard during it.

One session of torch's profiler runs at a time. While a recorder's does, what a kernel took is read from
that one, when it ends or is cut; the estimate stands until then.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from typing import Any

import torch
from torch._C import _profiler

from memprof.policies.remat.cells import Need
from memprof.policies.remat.counters import Counter
from memprof.recorder.profiler.native import NativeEvents, allocations
from memprof.recorder.profiler.profiler_guard import ProfilerGuard
from memprof.recorder.profiler.sessions import may_start, short_session

_Tensor = torch.Tensor
_LISTS = (list, tuple)
_now_ns, _wall_ns = time.perf_counter_ns, time.time_ns
#: How far the profiler's clock may be off the system's.
_CLOCK_SLACK_NS = 3_000
#: Parts of the names of operators whose kernels take memory of their own, about as much as they read and write.
_HUNGRY = (
    "conv",
    "rnn",
    "scaled_dot_product",
    "norm",
    "grid_sampler",
    "cdist",
    "embedding_dense",
    "_foreach",
    "linalg",
)


class Needs:
    """Bytes taken by operators while they run, by operator and by the shapes it is given."""

    def __init__(self, counter: Counter, device: torch.device) -> None:
        """Knows none.

        Args:
            counter: Counts the bytes allocated.
            device: Whose memory it is about.
        """
        self._counter = counter
        self._device = device
        self._kinds: dict[Any, Need] = {}
        self._can_hear = NativeEvents.is_available() and device.type == "cpu"
        self._awaited: list[tuple[Need, int, int, int]] = []  # who ran, from when to when, and what was kept of it
        self._listener = self._hear
        self._guard = ProfilerGuard()

    def of(self, key: Any) -> Need:
        """Returns what a kind of run takes.

        Args:
            key: The operator and the shapes, as something that can be hashed.
        """
        need = self._kinds.get(key)
        if need is None:
            need = self._kinds[key] = Need()
        return need

    def estimate_bytes(self, function: Any, args: Any, kwargs: Any) -> int:
        """Returns about what a run takes: its outputs as shapes tell, and workspace where kernels are known for it."""
        inputs = [tensor for tensor in _tensors((args, tuple(kwargs.values()))) if tensor.device == self._device]
        input_bytes = sum(tensor.untyped_storage().nbytes() for tensor in inputs if tensor.layout is torch.strided)
        output_bytes = _output_bytes(function, args, kwargs)
        if output_bytes < 0:
            output_bytes = 2 * input_bytes
        return output_bytes + (input_bytes + output_bytes if _is_hungry(function) else 0)

    def begin(self) -> None:
        """Begins to read what recorders hear."""
        self._guard.install()
        NativeEvents.listeners.append(self._listener)

    def end(self) -> None:
        """Ends it."""
        self._guard.remove()
        NativeEvents.listeners.remove(self._listener)

    def must_learn(self, need: Need) -> bool:
        """Whether a kernel has to be watched in its next run, since it is not known what it takes."""
        return need.highest_bytes < 0 or (not need.is_awaited and may_start())

    def learn(self, need: Need, guess_bytes: int, function: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        """Runs an operator and hears what its kernel takes; the guess stands where that is told later, or never.

        Args:
            need: Where that is noted.
            guess_bytes: What ``estimate_bytes`` says.
            function: The operator.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            The result, and how long it took in microseconds.
        """
        before = self._counter.used_bytes()
        with short_session() as session:
            # A scope that no training job enters: the session neither sees nor outlives one of the job's.
            scope = _profiler.RecordScope.LITE_INTERPRETER
            need.is_heard = self._can_hear and session.start(scope, profile_memory=True)
            if need.is_heard:
                start = _now_ns()
                result = function(*args, **kwargs)
                took_ns = _now_ns() - start
                highest = _highest_of(allocations(session.stop()))
        if not need.is_heard:
            start, start_wall = _now_ns(), _wall_ns()
            result = function(*args, **kwargs)
            took_ns, end_wall = _now_ns() - start, _wall_ns()
            is_hungry = _is_hungry(function)
            kept = self._counter.used_bytes() - before
            highest = max(guess_bytes + guess_bytes // 2, kept + kept // 2) if is_hungry else 0
            need.is_heard = not is_hungry
            need.is_awaited = is_hungry and self._can_hear
            if need.is_awaited:
                self._awaited.append((need, start_wall, end_wall, kept))
        need.highest_bytes = max(highest, self._counter.used_bytes() - before, 0)
        return result, took_ns / 1000

    def _hear(self, heard: list[Any]) -> None:
        """Reads what the awaited kernels took out of what a recorder heard."""
        awaited, self._awaited = self._awaited, []
        if not awaited:
            return
        heard = [event for event in heard if event.extra_fields.device.type == self._device.type]
        times = [event.start_time_ns for event in heard]
        order = sorted(range(len(times)), key=times.__getitem__)
        times = [times[number] for number in order]
        for need, start, end, kept in awaited:
            need.is_awaited = False
            first, last = bisect_left(times, start - _CLOCK_SLACK_NS), bisect_right(times, end + _CLOCK_SLACK_NS)
            highest, left = _highest([heard[number].extra_fields.alloc_size for number in order[first:last]])
            # Where more was heard than the kernel's own, the next run is read instead.
            if left == kept:
                need.highest_bytes, need.is_heard = highest, True


def _is_hungry(function: Any) -> bool:
    """Whether an operator's kernel is known to take memory of its own."""
    return any(part in str(function) for part in _HUNGRY)


def _highest_of(heard: list[Any]) -> int:
    """Returns the most bytes that were held at once of those that a session heard being taken."""
    in_order = sorted(heard, key=lambda event: event.start_time_ns)
    return _highest([event.extra_fields.alloc_size for event in in_order])[0]


def _highest(sizes: list[int]) -> tuple[int, int]:
    """Returns the most bytes held at once while blocks were taken and given back (negative sizes), and those left."""
    total = highest = 0
    for size in sizes:
        total += size
        highest = max(highest, total)
    return highest, total


def _output_bytes(function: Any, args: Any, kwargs: Any) -> int:
    """Returns the bytes of an operator's new outputs, asked of it without memory; -1 where it cannot tell."""
    if not _tensors((args, tuple(kwargs.values()))) and kwargs.get("device") is None:
        return -1  # nothing tells it to take no memory: it would be run, and whatever it does done twice
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        try:
            shadows = _shadow(list(args)), {name: _shadow(value) for name, value in kwargs.items()}
            result = function(*shadows[0], **shadows[1])
            given = {tensor.untyped_storage()._cdata for tensor in _tensors(shadows[0])}
            made = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in _tensors([result])}
        except (RuntimeError, TypeError, ValueError, AssertionError, IndexError, AttributeError):
            return -1  # the operator has no shape function, or asks for values
        return sum(size for address, size in made.items() if address not in given)


def _shadow(value: Any) -> Any:
    """Returns an argument without memory."""
    if isinstance(value, _Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if type(value) in _LISTS:
        return type(value)(_shadow(item) for item in value)
    return torch.device("meta") if isinstance(value, torch.device) else value


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, _Tensor):
            found.append(value)
        elif type(value) in _LISTS:
            found += _tensors(value)
    return found
