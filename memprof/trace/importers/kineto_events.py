"""The memory events of a profiler trace, and what ran around each."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memprof.errors import BadInputError
from memprof.trace.files.reading import parse_json
from memprof.trace.importers.frames import NO_STACK, Stack, StackTable, text_of

#: Names of torch's device types (c10/core/DeviceType.h) as the profiler numbers them; ROCm calls its devices cuda.
_DEVICE_TYPES = {0: "cpu", 1: "cuda", 6: "cuda", 12: "xpu", 13: "mps"}

_AROUND = ("cpu_op", "Operator", "user_annotation", "python_function")
_FRAME = re.compile(r"^(.+)\((\d+)\): (.*)$", re.DOTALL)
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function|Backward\d*$|^torch::autograd::")
_FORWARD = "nn.Module: "
_OPTIMIZER = "Optimizer.step#"
_PROFILER_STEP = re.compile(r"^ProfilerStep#?\*?(\d*)")


#: Minimum text bytes per object or list. Real traces have 30 or more; each takes at least 60 bytes of memory.
_BYTES_PER_CONTAINER = 8
_FEW_CONTAINERS = 10_000


@dataclass(frozen=True)
class MemoryEvent:
    """An allocation (bytes above 0) or a free.

    Attributes:
        time_us: Time.
        device: Such as ``cuda:0``.
        number: The device's number, 0 for the CPU.
        size: Bytes; below 0 for a free.
        address: Address; 0 where the trace has none.
        allocated: The allocator's own count afterwards; None where the trace has none.
        reserved: Its count of reserved bytes; None where the trace has none.
        thread: The thread it happened on.
    """

    time_us: float
    device: str
    number: int
    size: int
    address: int
    allocated: int | None
    reserved: int | None
    thread: str


@dataclass(frozen=True)
class ProfilerStep:
    """A step marked with the profiler."""

    number: int | None
    start_us: float
    end_us: float


@dataclass(frozen=True, eq=False)
class KinetoTrace:
    """A profiler trace.

    Attributes:
        memory: Its memory events, by time.
        steps: Its steps, by time.
        around: What ran on each thread, as (start, end, name, call stack), by start.
        device_names: Name of each device by its number.
        base_us: Offset to add to times for Unix time.
    """

    memory: list[MemoryEvent]
    steps: list[ProfilerStep]
    around: dict[str, list[tuple[float, float, str, str]]]
    device_names: dict[int, str]
    base_us: float


def parse_kineto(path: Path, data: bytes) -> KinetoTrace:
    """Reads a profiler trace.

    Raises:
        BadInputError: It is not JSON or not a profiler trace, or it has no memory events.
    """
    containers = data.count(b"{") + data.count(b"[")
    if containers > len(data) / _BYTES_PER_CONTAINER + _FEW_CONTAINERS:
        raise BadInputError(
            f"{path} is not JSON, or is cut short: {containers:,} objects in {len(data):,} bytes are too many."
        )
    try:
        loaded = parse_json(data, strict=False)
    except ValueError as error:
        raise BadInputError(f"{path} is not JSON, or is cut short: {error}.") from None
    events = loaded.get("traceEvents") if isinstance(loaded, dict) else loaded
    if not isinstance(events, list):
        raise BadInputError(f"{path} is JSON, but not a profiler trace: it has no traceEvents.")
    memory = [event for event in events if isinstance(event, dict) and event.get("name") == "[memory]"]
    if not memory:
        raise BadInputError(
            f"{path} holds {len(events):,} events but none of memory: record it with torch.profiler.profile("
            "profile_memory=True)."
        )
    top = loaded if isinstance(loaded, dict) else {}
    around = _around(events)
    return KinetoTrace(
        memory=sorted((_memory_event(path, event) for event in memory), key=lambda one: one.time_us),
        steps=_steps(around),
        around=around,
        device_names=_device_names(top.get("deviceProperties")),
        base_us=_base_us(top.get("baseTimeNanoseconds")),
    )


def _memory_event(path: Path, event: dict[str, Any]) -> MemoryEvent:
    args = event.get("args")
    time_us = _moment(event.get("ts"))
    if not isinstance(args, dict) or time_us is None:
        raise BadInputError(f"{path} is damaged: a [memory] event has no time or no args.")
    size: Any = args.get("Bytes")
    kind, number = args.get("Device Type", 0), args.get("Device Id", -1)
    if not (_is_whole(size) and _is_whole(kind) and _is_whole(number)):
        raise BadInputError(f"{path} is damaged: a [memory] event has no integer byte count, or no device.")
    number = max(number, 0)
    name = _DEVICE_TYPES.get(kind, f"device{kind}")
    # Torch counts the CPU's memory only while a profiler runs, and reports 0 with a mapped file or shared memory.
    counts = {} if name == "cpu" else args
    return MemoryEvent(
        time_us=time_us,
        device="cpu" if name == "cpu" else f"{name}:{number}",
        number=number,
        size=size,
        address=args["Addr"] if _is_whole(args.get("Addr")) else 0,
        allocated=counts["Total Allocated"] if _is_whole(counts.get("Total Allocated")) else None,
        reserved=counts["Total Reserved"] if _is_whole(counts.get("Total Reserved")) else None,
        thread=_thread(event),
    )


def _steps(around: Mapping[str, Sequence[tuple[float, float, str, str]]]) -> list[ProfilerStep]:
    found = [
        ProfilerStep(int(match[1]) if match[1] and len(match[1]) < 10 else None, start, end)
        for ran in around.values()
        for start, end, name, _ in ran
        if (match := _PROFILER_STEP.match(name))
    ]
    return sorted(found, key=lambda step: step.start_us)


def _around(events: Sequence[Any]) -> dict[str, list[tuple[float, float, str, str]]]:
    threads: dict[str, list[tuple[float, float, str, str]]] = {}
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X" or event.get("cat") not in _AROUND:
            continue
        start, duration = _moment(event.get("ts")), _moment(event.get("dur"))
        if start is None or duration is None:
            continue
        args = event.get("args")
        calls = text_of(args.get("Call stack")) if isinstance(args, dict) else ""
        threads.setdefault(_thread(event), []).append((start, start + duration, text_of(event.get("name")), calls))
    for ran in threads.values():
        ran.sort(key=lambda one: (one[0], -one[1]))
    return threads


def stacks_of(trace: KinetoTrace, events: Sequence[MemoryEvent], stacks: StackTable) -> list[Stack]:
    """Returns what ran around each memory event, as a stack."""
    found: list[Stack] = [NO_STACK] * len(events)
    by_thread: dict[str, list[int]] = {}
    for place, event in enumerate(events):
        by_thread.setdefault(event.thread, []).append(place)
    known: dict[tuple[str, ...], Stack] = {}
    for thread, places in by_thread.items():
        ran, next_one = trace.around.get(thread, []), 0
        open_ones: list[tuple[float, float, str, str]] = []
        for place in places:
            moment = events[place].time_us
            while next_one < len(ran) and ran[next_one][0] <= moment:
                while open_ones and open_ones[-1][1] < ran[next_one][0]:
                    open_ones.pop()
                open_ones.append(ran[next_one])
                next_one += 1
            while open_ones and open_ones[-1][1] < moment:
                open_ones.pop()
            if not open_ones:
                continue
            calls = next((one[3] for one in reversed(open_ones) if one[3]), "")
            key = (*(one[2] for one in open_ones), calls)
            if key not in known:
                known[key] = _stack(key[:-1], calls, stacks)
            found[place] = known[key]
    return found


def _stack(names: Sequence[str], calls: str, stacks: StackTable) -> Stack:
    """Builds a stack from the names of open spans, outermost first, and the call stack that an operator carries."""
    frames = [frame for name in reversed(names) if (frame := _frame(name))]
    frames = frames or [frame for name in calls.split(";") if (frame := _frame(name))]
    operators = [name for name in names if name.startswith("aten::")]
    phase = ""
    if any(_BACKWARD.search(name) for name in names):
        phase = "backward"
    elif any(name.startswith(_OPTIMIZER) for name in names):
        phase = "optimizer"
    elif any(name.startswith(_FORWARD) for name in names):
        phase = "forward"
    other = next((name for name in reversed(names) if not _PROFILER_STEP.match(name) and not _frame(name)), "")
    operator = operators[0].replace("::", ".") if operators else other
    return stacks.made(frames, operator, phase)


def _frame(name: str) -> dict[str, Any] | None:
    match = _FRAME.match(name)
    return {"filename": match[1], "line": int(match[2][:9]), "name": match[3]} if match else None


def _device_names(raw: Any) -> dict[int, str]:
    found = {}
    for one in raw if isinstance(raw, list) else []:
        if isinstance(one, dict) and _is_whole(one.get("id")):
            found[one["id"]] = text_of(one.get("name"))
    return found


def _base_us(value: Any) -> float:
    return value / 1000 if _is_whole(value) else 0.0


def _thread(event: dict[str, Any]) -> str:
    """Names a thread; traces of 2021 write it both as a number and as a text."""
    thread = event.get("tid")
    return thread if isinstance(thread, str) else str(thread) if _is_whole(thread) else ""


def _moment(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    is_number = type(value) in (int, float) and abs(value) < 2.0**62
    return float(value) if is_number and math.isfinite(value) else None


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**62
