"""Streams, events and CUDA graphs of the device of a dry run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, ClassVar

from memprof.virtual.device.current import CURRENT, ORDINALS

#: Number of CUDA among torch's device types.
CUDA_TYPE = 1


def _nothing(_self: Any, *_: Any, **__: Any) -> None:
    """Returns at once: operators run in the job's own order, and a graph is never executed."""


class Stream:
    """A stream that runs nothing: what a dry run executes, it executes in the job's own order.

    Attributes:
        stream_id: Its number, 0 for the default stream.
        device_index: Index of its device.
        device_type: Number of its device's type.
        device: Its device.
        cuda_stream: Its handle.
        priority: As given.
    """

    _numbers: ClassVar[Any] = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0, **known: int) -> None:
        """Makes a stream, or another object for a known one.

        Args:
            device: The device; there is only one.
            priority: Has no effect.
            known: ``stream_id``, ``device_index`` and ``device_type`` of a known stream.
        """
        self.stream_id = known["stream_id"] if "stream_id" in known else next(self._numbers)
        self.device_index, self.device_type = ORDINALS.index, CUDA_TYPE
        self.device, self.cuda_stream, self.priority = ORDINALS.current(), self.stream_id, priority

    @classmethod
    def priority_range(cls) -> tuple[int, int]:
        """Returns the least and the greatest priority."""
        return 0, -5

    @property
    def _as_parameter_(self) -> Any:
        import ctypes

        return ctypes.c_void_p(self.cuda_stream)

    synchronize = wait_stream = wait_event = __exit__ = _nothing

    def query(self) -> bool:
        """Returns True: all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Returns whether a graph is being captured."""
        return CURRENT.is_capturing

    def record_event(self, event: Any = None) -> Any:
        """Returns the event, recorded."""
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> Stream:
        """Does nothing: operators run in order anyway."""
        return self

    def __eq__(self, other: object) -> bool:
        """Whether it is the same stream."""
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        """Hashes its number."""
        return hash((self.stream_id, self.device_index))

    def __repr__(self) -> str:
        """Reads as torch's own does."""
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"


class ExternalStream(Stream):
    """A stream made by another library."""

    def __init__(self, stream_ptr: int, device: Any = None, **known: int) -> None:
        """Stores the stream's handle."""
        super().__init__(device, stream_id=stream_ptr, **known)


class Event:
    """An event, recorded when the job's Python reaches it.

    Attributes:
        device: Its device.
        cuda_event: Its handle.
    """

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
        device: Any = None,
    ) -> None:
        """Makes an event that is not recorded yet; the arguments, those of torch.Event included, have no effect."""
        self.device, self.cuda_event = ORDINALS.current(), 0
        self._recorded_s = 0.0

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: Any) -> Event:
        """Fails: another process of the job has a device of its own.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("a dry run cannot share events between processes: each has a virtual device of its own")

    def ipc_handle(self) -> Any:
        """Fails, like ``from_ipc_handle``.

        Raises:
            RuntimeError: Always.
        """
        return self.from_ipc_handle(self.device, None)

    def record(self, stream: Any = None) -> None:
        """Stores the current time."""
        self._recorded_s = time.perf_counter()

    synchronize = wait = _nothing

    def query(self) -> bool:
        """Returns True: all work is done."""
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Returns the milliseconds between two times of the dry run, which are not device times."""
        return max((end_event._recorded_s - self._recorded_s) * 1e3, 1e-3)


def renamed(kind: type, original: Any) -> type:
    """Gives a class the name and the module of the one that it stands in for.

    What else the original has in this build, the class has too: methods refuse, handles and numbers are 0.
    """
    kind.__name__, kind.__qualname__, kind.__module__ = original.__name__, original.__qualname__, original.__module__
    for name in dir(original):
        if name.startswith("_") or hasattr(kind, name):
            continue
        is_method = callable(getattr(original, name))
        stated = ORDINALS.current() if name == "device" else 0
        setattr(kind, name, _refusal(f"{kind.__module__}.{kind.__name__}.{name}") if is_method else stated)
    return kind


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{name} cannot be dry-run: it needs a real device. Dry-run the job without it.")

    return refuse


class CUDAGraph:
    """A graph of which only the memory is simulated.

    What is allocated during its capture is in a pool that is never released to the device, as replays write to it. It
    is not executed again: a replay takes no memory.
    """

    _pool: tuple[int, int] | None = None
    _is_captured = False

    def __new__(cls, keep_graph: bool = False) -> CUDAGraph:
        """Makes an empty graph."""
        return super().__new__(cls)

    def capture_begin(
        self, pool: Any = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        """Allocates from a pool from now on.

        Args:
            pool: Its identifier; a new one if omitted.
            capture_error_mode: Has no effect.
            check_input_liveness: Has no effect.

        Raises:
            RuntimeError: A graph is being captured.
        """
        chosen = CURRENT.new_pool() if pool is None else tuple(pool)
        CURRENT.capture_into(chosen)
        self._pool = chosen

    def capture_end(self) -> None:
        """Ends the capture.

        Raises:
            RuntimeError: None has begun.
        """
        CURRENT.end_capture()
        self._is_captured = True

    instantiate = enable_debug_mode = debug_dump = _nothing

    def replay(self) -> None:
        """Takes no memory.

        Raises:
            RuntimeError: Nothing was captured.
        """
        if not self._is_captured:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")

    def reset(self) -> None:
        """Forgets the capture; its pool is kept."""
        self._is_captured = False

    def pool(self) -> tuple[int, int]:
        """Returns the identifier of its pool.

        Raises:
            RuntimeError: Nothing was captured.
        """
        if self._pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def get_graph_data(self) -> dict[str, Any]:
        """Returns an empty dictionary: a dry run builds no graph."""
        return {}

    def raw_cuda_graph(self) -> int:
        """Returns no handle: 0."""
        return 0

    raw_cuda_graph_exec = raw_cuda_graph
