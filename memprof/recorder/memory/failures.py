"""Records failed allocations, and the state of the optimizers at that time."""

from __future__ import annotations

import mmap
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from memprof.machines.host_limits import HostLimit, nearest_limit
from memprof.recorder.calls.module_registry import ModuleRegistry
from memprof.recorder.log import RawLog
from memprof.recorder.memory.inventory import tensors_in
from memprof.recorder.memory.live_objects import live_objects
from memprof.recorder.memory.out_of_memory import describe_failure, listen_to_allocator, place_of_failure, text_of
from memprof.recorder.memory.tensor_memory import bytes_of
from memprof.recorder.steps.rounds import OptimizerRounds
from memprof.recorder.steps.usages import state_of
from memprof.trace.files.spool_writer import SpoolWriter

#: Reserve for writing all this in a process that can allocate no more (``ulimit -v``): mapped but never touched, so it
#: uses no memory until it is released.
_RESERVE_BYTES = 8 << 20


class FailureLog:
    """The streams ``out_of_memory`` and ``optimizers`` of one recording.

    A recorded error is recognized by its address and message: the error itself is not kept.
    """

    def __init__(self, folder: Path, log: RawLog, registry: ModuleRegistry, rounds: OptimizerRounds) -> None:
        """Stores the recorder's shared components."""
        self._folder = folder
        self._log = log
        self._registry = registry
        self._rounds = rounds
        self._count = 0
        self._last: tuple[int, str] | None = None
        self._reserve: mmap.mmap | None = None
        self._limit: HostLimit | None = None

    def prepare(self) -> None:
        """Maps the reserve, for use when no memory is left."""
        listen_to_allocator()
        if self._reserve is None:
            try:
                self._reserve = mmap.mmap(-1, _RESERVE_BYTES)
            except OSError:
                return  # already no memory left

    def free_reserve(self) -> None:
        """Measures the free memory without the reserve, then releases it."""
        if self._reserve is not None:
            self._limit = nearest_limit()
            self._reserve.close()
            self._reserve = None

    def release(self) -> None:
        """Releases the reserve for good: the recording is over."""
        self.free_reserve()
        self._limit = None

    def _take_limit(self) -> HostLimit | None:
        """Returns the limit measured before the reserve was released for this failure, else the current one."""
        self.free_reserve()
        limit, self._limit = self._limit or nearest_limit(), None
        return limit

    def note(self, error: BaseException) -> None:
        """Records that the operator logged last ran out of memory."""
        self._last = (id(error), text_of(error))
        failure = describe_failure(error, self._take_limit())
        self._write_failure({"op": self._log.op_count - 1, "is_operator": True, **failure})

    def end_with(self, error: BaseException, step: int, last_op: int, *, is_open: bool) -> None:
        """Records that the job ends with an error, and the error itself unless an operator raised it.

        Args:
            error: The error.
            step: The current step, -1 if unknown.
            last_op: Number of the last operator logged in it, -1 if there was none or the step was not recorded.
            is_open: The recording is open; else the record is appended to its file.
        """
        if self._last != (id(error), text_of(error)):
            place = place_of_failure(error)
            failure = describe_failure(error, self._take_limit())
            record = {"op": last_op, "is_operator": False, "step": step, **failure, **place}
            record["module"] = self._registry.find(place["module"])
            self._write_failure(record, is_open=is_open)
        self._write("fatal", self._count - 1, is_open=is_open)

    def note_optimizers(self) -> None:
        """Records the state of every optimizer of the job, including those that have not updated yet."""
        self._rounds.meet(live_objects(torch.optim.Optimizer))
        with torch._C.DisableTorchFunction():  # otherwise a mode or subclass of the job's sees these reads
            records = [describe_optimizer(each, number, updates) for number, each, updates in self._rounds.numbered()]
        if records:
            self._log.record("optimizers", records)

    def _write_failure(self, record: dict[str, Any], *, is_open: bool = True) -> None:
        self._count += 1
        self._write("out_of_memory", record, is_open=is_open)

    def _write(self, stream: str, record: Any, *, is_open: bool) -> None:
        if is_open:
            self._log.record(stream, record)
            return
        writer = SpoolWriter(self._folder, is_new=False)
        try:
            writer.write_record(stream, record)
        finally:
            writer.close()


def describe_optimizer(optimizer: Any, number: int, updates: int) -> dict[str, Any]:
    """Returns a record of the ``optimizers`` stream."""
    kind = type(optimizer)
    # torch wraps `step` and names the wrapper after the original: a method of one of torch's own classes if a
    # class of the job's inherits it unchanged.
    step = kind.step
    groups = [_describe_group(group) for group in optimizer.param_groups]
    return {
        "number": number,
        "name": f"{kind.__module__}.{kind.__qualname__}",
        "algorithm": f"{step.__module__}.{step.__qualname__.rpartition('.')[0]}",
        "groups": groups,
        "state_bytes": sum(bytes_of(_own_part(tensor)) for tensor in tensors_in(list(state_of(optimizer).values()))),
        "scalar_bytes": torch.get_default_dtype().itemsize if torch.get_default_dtype() == torch.float64 else 4,
        "updates": updates,
    }


def _describe_group(group: dict[str, Any]) -> dict[str, Any]:
    settings = {
        name: list(value) if isinstance(value, (list, tuple)) else value
        for name, value in group.items()
        if isinstance(value, (bool, int, float, str)) or value is None or _is_numbers(value)
    }
    shapes = Counter(
        (tuple(_own_part(parameter).shape), parameter.element_size())
        for parameter in group["params"]
        # An uninitialized parameter has no known shape.
        if parameter.requires_grad and not is_lazy(parameter)
    )
    return {
        "settings": settings,
        # [sizes, bytes of an element, how many parameters]
        "parameters": [[list(shape), size, times] for (shape, size), times in shapes.items()],
    }


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a sharded tensor (DTensor); other tensors unchanged."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _is_numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(type(part) in (int, float) for part in value)
