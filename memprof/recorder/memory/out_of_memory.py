"""Describes failed allocations: requested size, location, and the allocator's state.

Errors are inspected, not kept: a kept error would keep its frames and their tensors, and a job that retries with a
smaller batch needs their memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from memprof.machines.host_limits import SHARED, SHARED_ADVICE, HostLimit, nearest_limit
from memprof.recorder.calls.tracebacks import OWN_CODE
from memprof.recorder.clock import clock_ns
from memprof.recorder.steps.usages import storing_phase
from memprof.trace.files.private_file import write_private
from memprof.trace.files.spool import BACKWARD, FORWARD, LOADING, OPTIMIZER, RAN_OUT, SAVING
from memprof.trace.secrets import mask_text

#: Messages of errors without a type of their own: torch's CPU allocator on Linux, on Windows and macOS, files mapped by
#: data loaders, Apple's devices, CUDA outside torch's allocator (c10/core/impl/alloc_cpu.cpp, ATen/MapAllocator.cpp).
_PHRASES = (
    "can't allocate memory: you tried to allocate",
    "not enough memory: you tried to allocate",
    "Cannot allocate memory",
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
#: Phrases of errors beside "shared memory": torch's own, and that of a loader whose worker ended by SIGBUS.
_FULL = ("No space left on device", "Bus error")
_REQUESTED = re.compile(r"(?:allocate|mmap) (\d+(?:\.\d+)?) ?(bytes?|[KMGTP]i?B)\b")
_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}
_DEVICE_NUMBER = re.compile(r"\bGPU (\d+)\b")
#: First word of an error message, and torch's name of the device.
_DEVICES = {"CUDA": "cuda", "HIP": "cuda", "XPU": "xpu", "MPS": "mps", "CUBLAS": "cuda", "CUDNN": "cuda"}
_cuda: Any = torch.cuda  # not annotated in torch
_MODULE_FILE = ("torch/nn/modules/module.py", "torch\\nn\\modules\\module.py")
_OPTIMIZER_FOLDER = re.compile(r"torch[/\\]optim[/\\]")
_BACKWARD_NAMES = ("_engine_run_backward", "backward")

_has_observer = False
#: What CUDA's allocator reported of the last failed request.
_reported: dict[str, int] = {}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an out-of-memory error."""
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(phrase in text_of(error) for phrase in _PHRASES)


def find_out_of_memory(error: BaseException | None) -> BaseException | None:
    """Finds an out-of-memory error in the one that ended the job: itself, its cause, or its context."""
    return next(filter(is_out_of_memory, _chain(error)), None)


def describe_full_sharing(error: BaseException | None) -> str:
    """Returns that shared memory was full, where what ended the job, its cause, or its context says so; else ""."""
    texts = [text for text in map(text_of, _chain(error)) if "shared memory" in text]
    is_full = any(phrase in text for text in texts for phrase in _FULL)
    return f"{RAN_OUT} {SHARED} was full: {SHARED_ADVICE}" if is_full else ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, its cause or context, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def text_of(error: BaseException) -> str:
    """Returns an error's message; "" for types that never mean lack of memory: a message may be costly, or raise."""
    with suppress(Exception):  # a type of the job's own may fail to print itself, which must not end the recording
        if isinstance(error, (MemoryError, OSError, RuntimeError)):
            return str(error)
    return ""


def listen_to_allocator() -> None:
    """Observes CUDA's failed requests in its allocator, once CUDA is in use: it reports their size to the byte.

    torch never detaches an observer; this one stores four numbers and does nothing else.
    """
    global _has_observer  # noqa: PLW0603 - one observer per process
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if not _has_observer and attach is not None and _cuda.is_initialized():
        attach(_observe)
        _has_observer = True


def _observe(device: int, requested: int, total: int, free: int) -> None:
    _reported.update(device=device, requested=requested, total=total, free=free)


def describe_failure(error: BaseException, limit: HostLimit | None) -> dict[str, Any]:
    """Returns a description of a failed request: its size, its device, and the device's state.

    Sizes are None if unknown. With CUDA, the requested size is that of the segment that the allocator requested from
    the driver: the tensor's bytes, rounded up.

    Args:
        error: The error raised.
        limit: The nearest limit on the process's memory, None if none is known.
    """
    text = text_of(error)
    device = _device(error, text)
    record: dict[str, Any] = {
        "time_ns": clock_ns(),
        "device": device,
        "requested_bytes": _requested_bytes(text),
        "allocated_bytes": None,
        "reserved_bytes": None,
        "largest_free_bytes": None,
        "free_bytes": None,
        "total_bytes": None,
        "message": mask_text(next(iter(text.strip().splitlines()), "")) or type(error).__name__,
    }
    if device == "cpu" and limit is not None:
        record.update(free_bytes=limit.free_bytes, total_bytes=limit.total_bytes)
    elif device.startswith("cuda") and _cuda.is_initialized():
        record.update(_cuda_state(int(device.partition(":")[2])))
    _reported.clear()
    return record


def place_of_failure(error: BaseException) -> dict[str, Any]:
    """Returns where an error was raised, from its traceback: the frames, their phase, the innermost module.

    For errors that no recorded operator raised. Frames are texts, innermost first; phase is a code of
    ``trace.spool``, -1 if they do not determine one; module is the module itself, None outside any.
    """
    frames: list[str] = []
    phase, module = -1, None
    trace = error.__traceback__
    while trace is not None:
        frame, code = trace.tb_frame, trace.tb_frame.f_code
        if not code.co_filename.startswith(OWN_CODE):
            frames.append(f"{code.co_filename}:{trace.tb_lineno}:{code.co_name}")
            storing = storing_phase(code)
            if phase in (SAVING, LOADING):
                pass  # its callees, methods of modules included, belong to it
            elif storing >= 0:
                phase, module = storing, None
            elif code.co_filename.endswith(_MODULE_FILE):
                phase = FORWARD
                called = frame.f_locals.get("self")
                module = called if isinstance(called, torch.nn.Module) else module
            elif _OPTIMIZER_FOLDER.search(code.co_filename):
                phase, module = OPTIMIZER, None
            elif code.co_name in _BACKWARD_NAMES and "autograd" in code.co_filename:
                phase, module = BACKWARD, None
        trace = trace.tb_next
    return {"frames": frames[::-1], "phase": phase, "module": module}


def write_unrecorded(path: Path, error: BaseException, full: str) -> None:
    """Writes a description of a failed request in an unrecorded process, for the parent to report.

    Args:
        path: The file.
        error: The error that ended the process.
        full: That shared memory was full, "" where it was not.

    Raises:
        OSError: It cannot be written.
    """
    place = place_of_failure(error)
    module = place["module"]
    place["module"] = "" if module is None else type(module).__name__
    write_private(path, json.dumps({**describe_failure(error, nearest_limit()), **place, "full": full}))


def _requested_bytes(text: str) -> int | None:
    """Parses the requested size from a message: in bytes from torch's CPU allocator, to two digits from others."""
    found = _REQUESTED.search(text)
    return None if found is None else round(float(found[1]) * _UNITS[found[2][0].lower()])


def _device(error: BaseException, text: str) -> str:
    kind = next((name for word, name in _DEVICES.items() if text.startswith(word)), "cpu")
    if kind == "cpu" and isinstance(error, torch.cuda.OutOfMemoryError):
        kind = "cuda"
    if kind != "cuda":
        return kind
    number = _DEVICE_NUMBER.search(text)
    if "device" in _reported:
        return f"cuda:{_reported['device']}"
    if number is not None:
        return f"cuda:{number[1]}"
    return f"cuda:{_cuda.current_device() if _cuda.is_initialized() else 0}"


def _cuda_state(device: int) -> dict[str, Any]:
    """Returns the state of CUDA's allocator and its device."""
    state: dict[str, Any] = {}
    try:
        counts = _cuda.memory_stats(device)
        state["allocated_bytes"] = counts.get("allocated_bytes.all.current")
        state["reserved_bytes"] = counts.get("reserved_bytes.all.current")
        state["largest_free_bytes"] = max(
            (
                block["size"]
                for segment in _cuda.memory_snapshot()
                if segment["device"] == device
                for block in segment["blocks"]
                if block["state"] == "inactive"
            ),
            default=0,
        )
        state["free_bytes"], state["total_bytes"] = _cuda.mem_get_info(device)
    except RuntimeError:
        # A device in an error state answers no queries; the values so far stand.
        state.setdefault("allocated_bytes", None)
    if _reported.get("device") == device:
        free, total = _reported["free"], _reported["total"]
        if total < state.get("total_bytes", total):
            # What the process may take at most (set_per_process_memory_fraction), whatever the device has free.
            free = max(min(free, total - (state.get("reserved_bytes") or 0)), 0)
        state.update(requested_bytes=_reported["requested"], free_bytes=free, total_bytes=total)
    return state
