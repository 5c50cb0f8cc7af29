"""The history that the job itself requests with ``torch.cuda.memory._record_memory_history``, in torch's form."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from memprof.recorder.clock import clock_ns

_SITE = f"{Path(torch.__file__).parent}/"
#: Python frames that only a dry run has: those of memprof, and those of torch that replace its C++ code.
_NOT_OF_JOB = (
    f"{Path(__file__).resolve().parents[2]}/",
    *(
        f"{_SITE}{place}"
        for place in (
            "_decomp/",
            "_library/",
            "_meta_registrations.py",
            "_ops.py",
            "_prims",
            "_refs/",
            "_subclasses/",
            "fx/",
            "overrides.py",
            "utils/_python_dispatch.py",
            "utils/_stats.py",
            "utils/_traceback.py",
        )
    ),
)
#: They keep torch.compile out of the dry run's mode.
_WRAPPERS = frozenset((f"{_SITE}_compile.py", f"{_SITE}_dynamo/eval_frame.py"))
#: Runs backward; on a GPU the engine's own thread does, whose stacks begin there.
_ENGINE = f"{_SITE}autograd/graph.py"
_CONTEXTS = (None, "state", "alloc", "all")
_NO_FRAMES: tuple[Any, ...] = ()

#: File, line and function of a frame.
Frame = tuple[str, int, str]
#: Action, address, size, microseconds, frames and metadata.
_Entry = tuple[str, int, int, int, tuple[Frame, ...], str]


class JobHistory:
    """The job's own history of the virtual device's allocator.

    Attributes:
        is_on: Whether the job records it now.
        operator: The operator that runs now; None outside any.
        is_awaited: Whether the job has not taken a snapshot since it began to record.
        is_failing: Whether the job's observers of a failed request run, whose error it gets next.
        metadata: What the job has set to be noted with each entry; as on a GPU, the thread of backward has none.
    """

    def __init__(self) -> None:
        """Starts switched off."""
        self.is_on = self.is_failing = False
        self.operator: Any = None
        self.is_awaited = False
        self.metadata = ""
        self._entries: deque[_Entry] = deque()
        self._context: str | None = None
        self._has_operators = False
        self._skipped: frozenset[str] = frozenset()
        self._stacks: dict[int, tuple[Frame, ...]] = {}

    def configure(
        self,
        enabled: str | None,
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = sys.maxsize,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        skip_actions: Iterable[str] = (),
        record_pinned_host_memory: bool = False,
        record_cuda: bool = True,
    ) -> None:
        """Switches the history, as ``torch._C._cuda_record_memory_history`` does; that of pinned memory stays empty.

        Raises:
            RuntimeError: A value is not one of those that torch accepts.
        """
        for value, known, what in (
            (enabled, (None, "state", "all"), "expected state to be 'state', 'all', or None"),
            (context, _CONTEXTS, "expected context to be 'state', 'alloc', 'all', or None"),
            (stacks, ("python", "all"), "expected stacks to be 'python', or 'all'"),
        ):
            if value not in known:
                raise RuntimeError(what)
        self._switch(
            is_on=enabled is not None and record_cuda,
            context=context,
            has_operators=stacks == "all",
            most=max_entries if enabled == "all" else 1,
            is_cleared=clear_history,
        )
        self._skipped = frozenset(skip_actions)

    def configure_as_before(
        self,
        enabled: bool,
        record_context: bool = True,
        trace_alloc_max_entries: int = 1,
        trace_alloc_record_context: bool = False,
        record_context_cpp: bool = False,
        clear_history: bool = False,
        *_: Any,
    ) -> None:
        """Switches the history, as ``torch._C._cuda_record_memory_history_legacy`` does."""
        self._switch(
            is_on=enabled,
            context="alloc" if trace_alloc_record_context else "state" if record_context else None,
            has_operators=record_context_cpp,
            most=trace_alloc_max_entries,
            is_cleared=clear_history,
        )
        self._skipped = frozenset()

    def _switch(self, *, is_on: bool, context: str | None, has_operators: bool, most: int, is_cleared: bool) -> None:
        is_cleared = is_cleared or not is_on
        kept = () if is_cleared else self._entries
        self._entries = deque(kept, maxlen=min(most, sys.maxsize))
        self.is_awaited = is_on and (self.is_awaited or not self.is_on or is_cleared)
        self.is_on = is_on
        self._context = context if is_on else None
        self._has_operators = has_operators

    def took(self, address: int, size: int) -> None:
        """Records an allocation of `size` requested bytes."""
        if self.is_on:
            frames = self._frames() if self._context is not None else _NO_FRAMES
            self._stacks[address] = frames
            self._add("alloc", address, size, frames if self._context != "state" else _NO_FRAMES)

    def gave(self, address: int, size: int) -> None:
        """Records that a block was freed."""
        frames = self._stacks.pop(address, _NO_FRAMES)
        if self.is_on:
            if self._context != "all":
                frames = _NO_FRAMES
            else:
                frames = self._frames() or frames
            self._add("free_requested", address, size, frames)
            self._add("free_completed", address, size, frames)

    def segment(self, action: str, address: int, size: int) -> None:
        """Records that a segment was reserved, mapped, unmapped or released, or that memory ran out."""
        if self.is_on:
            self._add(action, address, size, self._frames() if self._context in ("alloc", "all") else _NO_FRAMES)

    def fill(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """Adds the history and the stacks of blocks in use to a snapshot."""
        known: dict[tuple[Frame, ...], list[dict[str, Any]]] = {}
        entries = self._entries.copy()  # garbage collection, which may start while it is shown, frees tensors
        snapshot["device_traces"] = [[self._as_dict(entry, known) for entry in entries]]
        for segment in snapshot["segments"]:
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    block["frames"] = _shown(self._stacks.get(block["address"], _NO_FRAMES), known)
        return snapshot

    def _add(self, action: str, address: int, size: int, frames: tuple[Frame, ...]) -> None:
        if action not in self._skipped:
            metadata = self.metadata if torch._C._current_graph_task_id() == -1 else ""
            self._entries.append((action, address, size, clock_ns() // 1000, frames, metadata))

    def _frames(self) -> tuple[Frame, ...]:
        """Returns the stack of the job, innermost frame first, below the operator and the node of backward."""
        is_backward = torch._C._current_graph_task_id() != -1
        native = _NO_FRAMES if not self._has_operators else tuple(self._native(is_backward=is_backward))
        return (*native, *_job_frames(sys._getframe(2), is_backward=is_backward))

    def _native(self, *, is_backward: bool) -> Iterator[Frame]:
        operator = self.operator
        if isinstance(operator, torch._ops.OpOverload):
            name = operator._schema.name.partition("::")[2]
            overload = operator._schema.overload_name
            yield "??", 0, f"at::_ops::{name}{f'_{overload}' if overload else ''}::call"
        if is_backward:
            node = torch._C._current_autograd_node()
            if node is not None:
                yield "??", 0, f"torch::autograd::generated::{node.name()}::apply"
            yield "??", 0, "torch::autograd::Engine::evaluate_function"

    @staticmethod
    def _as_dict(entry: _Entry, known: dict[tuple[Frame, ...], list[dict[str, Any]]]) -> dict[str, Any]:
        action, address, size, time_us, frames, metadata = entry
        return {
            "action": action,
            "device_free" if action == "oom" else "addr": address,
            "size": size,
            "stream": 0,
            "time_us": time_us,
            "compile_context": "N/A",
            "user_metadata": metadata,
            "pool_id": (0, 0),
            "frames": _shown(frames, known),
        }


def _job_frames(frame: FrameType | None, *, is_backward: bool) -> Iterator[Frame]:
    is_inside = True  # still in the wrappers that call the dry run's mode
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if is_backward and file == _ENGINE:
            return
        if not file.startswith(_NOT_OF_JOB) and not (is_inside and file in _WRAPPERS):
            is_inside = False
            yield file, frame.f_lineno, code.co_name
        frame = frame.f_back


def _shown(frames: tuple[Frame, ...], known: dict[tuple[Frame, ...], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    shown = known.get(frames)
    if shown is None:
        shown = known[frames] = [{"name": name, "filename": file, "line": line} for file, line, name in frames]
    return shown
