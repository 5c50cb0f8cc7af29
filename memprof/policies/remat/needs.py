"""Knows how many bytes each operator takes while it runs: estimated before the first run, and heard during it."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch._C import _autograd, _profiler

from memprof.policies.remat.cells import Need
from memprof.policies.remat.counters import Counter
from memprof.recorder.native import NativeEvents, allocations, start_profiler

_Tensor = torch.Tensor
_LISTS = (list, tuple)
_now_ns = time.perf_counter_ns
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
        is_hungry = any(part in str(function) for part in _HUNGRY)
        return output_bytes + (input_bytes + output_bytes if is_hungry else 0)

    def can_hear(self) -> bool:
        """Whether a kernel can be listened to now: two sessions of torch's profiler cannot run at once."""
        return self._can_hear and not _autograd._profiler_enabled()

    def learn(self, need: Need, guess_bytes: int, function: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        """Runs an operator and hears what its kernel takes; where it cannot be heard, the guess stands until it can.

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
        need.is_heard = self.can_hear()
        if not need.is_heard:
            start = _now_ns()
            result = function(*args, **kwargs)
            took_ns = _now_ns() - start
            is_hungry = any(part in str(function) for part in _HUNGRY)
            kept = self._counter.used_bytes() - before
            highest = max(guess_bytes + guess_bytes // 2, kept + kept // 2) if is_hungry else 0
            need.is_heard = not is_hungry
        else:
            # A scope that no training job enters: the session neither sees nor outlives one of the job's.
            start_profiler(_profiler.RecordScope.LITE_INTERPRETER, profile_memory=True)
            try:
                start = _now_ns()
                result = function(*args, **kwargs)
                took_ns = _now_ns() - start
            finally:
                heard = _autograd._disable_profiler()
            highest = _highest_of(heard)
        need.highest_bytes = max(highest, self._counter.used_bytes() - before, 0)
        return result, took_ns / 1000


def _highest_of(heard: Any) -> int:
    """Returns the most bytes that were held at once of those that a session heard being taken."""
    total = highest = 0
    for event in sorted(allocations(heard), key=lambda event: event.start_time_ns):
        total += event.extra_fields.alloc_size
        highest = max(highest, total)
    return highest


def _output_bytes(function: Any, args: Any, kwargs: Any) -> int:
    """Returns the bytes of an operator's new outputs, asked of it without memory; -1 where it cannot tell."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        try:
            shadows = _shadow(list(args)), {name: _shadow(value) for name, value in kwargs.items()}
            result = function(*shadows[0], **shadows[1])
        except (RuntimeError, TypeError, ValueError, AssertionError, IndexError, AttributeError):
            return -1  # the operator has no shape function, or asks for values
        given = {tensor.untyped_storage()._cdata for tensor in _tensors(shadows[0])}
        made = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in _tensors([result])}
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
