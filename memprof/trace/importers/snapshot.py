"""Reads a memory snapshot of torch's CUDA allocator: its devices, each with a history and an end state."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memprof.errors import BadInputError
from memprof.trace.importers.allocations import BlockSizes, Reserved, find_lives, find_reserved
from memprof.trace.importers.columns import (
    check_dicts,
    read_annotations,
    read_blocks,
    read_entries,
    read_segments,
)
from memprof.trace.importers.device import DeviceHistory, find_facts
from memprof.trace.importers.frames import StackTable
from memprof.trace.importers.safe_pickle import RefusedError, load_plain
from memprof.trace.importers.snapshot_events import examine_segments, with_pools
from memprof.trace.importers.sniff import SNAPSHOT, read_input
from memprof.trace.schema import Segments

#: Called with the current activity, and the share completed.
Progress = Callable[[str, float], None]

#: More devices than any machine has; a longer list is not a list of devices.
_MOST_DEVICES = 1024


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A memory snapshot.

    Attributes:
        devices: Its devices with segments or a history.
        torch_version: The versions of torch that write such a snapshot, such as ``2.5 or 2.6``.
        settings: The allocator settings the job was given; "" where the file has none.
    """

    devices: tuple[DeviceHistory, ...]
    torch_version: str
    settings: str


def read_snapshot(
    path: Path, on_progress: Progress = lambda what, share: None, block_sizes: BlockSizes | None = None
) -> Snapshot:
    """Reads a snapshot from a file.

    Args:
        path: The file.
        on_progress: Called from time to time.
        block_sizes: Determines block sizes; the allocator's rounding where left out.

    Raises:
        BadInputError: It is not a snapshot, is damaged, or has invalid content.
    """
    kind, data = read_input(path)
    if kind != SNAPSHOT:
        raise BadInputError(f"{path} is JSON, such as a profiler trace, not a memory snapshot.")
    return parse_snapshot(path, data, on_progress, block_sizes)


def parse_snapshot(
    path: Path,
    data: bytes,
    on_progress: Progress = lambda what, share: None,
    block_sizes: BlockSizes | None = None,
) -> Snapshot:
    """Reads a snapshot from the bytes of its pickle.

    Args:
        path: Name of the file, for errors.
        data: The pickle.
        on_progress: Called from time to time.
        block_sizes: Determines block sizes; the allocator's rounding where left out.

    Raises:
        BadInputError: It is not a snapshot, is damaged, or has invalid content.
    """
    with _without_collector():
        return _parse(path, data, on_progress, block_sizes)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pauses Python's garbage collector, which would take longer over millions of new containers than loading them."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


def _parse(path: Path, data: bytes, on_progress: Progress, block_sizes: BlockSizes | None) -> Snapshot:
    try:
        loaded = load_plain(data, lambda share: on_progress("checking", share))
    except RefusedError as refusal:
        place = f" (byte {refusal.position:,})" if refusal.position else ""
        raise BadInputError(f"{path} is not a memory snapshot, or is damaged: {refusal.reason}{place}.") from None
    del data
    try:
        return _from_plain(loaded, on_progress, block_sizes)
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from None


def _from_plain(loaded: Any, on_progress: Progress, block_sizes: BlockSizes | None) -> Snapshot:
    if isinstance(loaded, list):
        loaded = {"segments": loaded}  # the result of torch.cuda.memory_snapshot(), saved as it is
    if not isinstance(loaded, dict) or not ("segments" in loaded or "device_traces" in loaded):
        raise BadInputError("it is a pickle, but has no segments and no device_traces: it is not a memory snapshot.")
    segments, traces = loaded.get("segments", []), loaded.get("device_traces", [])
    check_dicts(segments, "the segments")
    if not isinstance(traces, list) or len(traces) > _MOST_DEVICES:
        raise BadInputError("Its device_traces are not a list with one history per device.")
    by_device: dict[int, list[Any]] = {}
    for segment in segments:
        number = segment.get("device", 0)
        if type(number) is not int or not 0 <= number < _MOST_DEVICES:
            raise BadInputError("A segment names no device.")
        by_device.setdefault(number, []).append(segment)
    version, settings = _torch_version(loaded, traces), _settings(loaded.get("allocator_settings"))
    numbers = sorted({*by_device, *(number for number, trace in enumerate(traces) if trace)})
    cpu = _cpu_of_profile(traces)
    if cpu is not None:
        # As in a profiler trace, the CPU counts only if no device was used.
        numbers = [number for number in numbers if number != cpu] or [cpu]
    devices = []
    for place, number in enumerate(numbers):
        on_progress("sorting", place / len(numbers))
        trace = traces[number] if number < len(traces) else []
        raw = by_device.get(number, [])
        if cpu is not None:
            devices.append(_profiled_device(0 if number == cpu else number, number == cpu, trace, raw))
        else:
            annotations = loaded.get("external_annotations")
            devices.append(_device(number, trace, raw, annotations, settings, block_sizes))
        if number < len(traces):
            traces[number] = None  # its entries take most of the memory
    return Snapshot(tuple(devices), "" if cpu is not None else version, settings)


def _cpu_of_profile(traces: list[Any]) -> int | None:
    """Returns the place of the CPU in a history made from a profile, behind all devices; None for other histories."""
    entries = (entry for trace in traces if isinstance(trace, list) for entry in trace[:1])
    is_profile = any(isinstance(entry, dict) and "category" in entry for entry in entries)
    return len(traces) - 1 if is_profile else None


def _profiled_device(number: int, is_cpu: bool, trace: Any, raw: list[Any]) -> DeviceHistory:
    """Reads a device of ``torch.cuda._memory_viz.profile_plot``: its segment spans the addresses, nothing more."""
    stacks, name = StackTable(), "cpu" if is_cpu else f"cuda:{number}"
    entries = read_entries(trace, stacks, f"the history of {name}")
    blocks, segments = read_blocks([one for one in raw if one.get("address") is not None], stacks), Segments.empty()
    lives, reserved = find_lives(entries, blocks, rounding=1), Reserved.unknown(len(entries))
    return DeviceHistory(
        number=number,
        name=name,
        entries=entries,
        segments=segments,
        blocks=blocks,
        annotations=[],
        stacks=stacks,
        lives=lives,
        reserved=reserved,
        facts=find_facts(name, entries, segments, blocks, len(blocks), lives, reserved, knows_start=False),
        remarks=("it was made from a profile: categories are the profiler's own, and reserved memory is unknown.",),
    )


def _device(
    number: int, trace: Any, raw: list[Any], annotations: Any, settings: str, block_sizes: BlockSizes | None
) -> DeviceHistory:
    stacks = StackTable()
    entries = read_entries(trace, stacks, f"the history of device {number}")
    raw, remarks = examine_segments(raw)
    segments, blocks = read_segments(raw, number), read_blocks(raw, stacks)
    entries = with_pools(entries, segments)
    sizes = None if block_sizes is None else block_sizes(entries, blocks, segments, settings)
    lives, reserved = find_lives(entries, blocks, sizes=sizes), find_reserved(entries, segments)
    all_blocks = sum(len(segment.get("blocks", ())) for segment in raw)
    return DeviceHistory(
        number=number,
        name=f"cuda:{number}",
        entries=entries,
        segments=segments,
        blocks=blocks,
        annotations=read_annotations(annotations, number),
        stacks=stacks,
        lives=lives,
        reserved=reserved,
        facts=find_facts(f"cuda:{number}", entries, segments, blocks, all_blocks, lives, reserved),
        remarks=remarks,
    )


def _settings(raw: Any) -> str:
    if not isinstance(raw, dict):
        return ""
    for key in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if type(raw.get(key)) is str and raw[key]:
            return str(raw[key])
    # Set by the program, not by the environment.
    split, threshold = raw.get("max_split_size"), raw.get("garbage_collection_threshold")
    options = ["expandable_segments:True"] if raw.get("expandable_segments") is True else []
    options += [f"max_split_size_mb:{split >> 20}"] if type(split) is int and 0 < split < 2**62 else []
    options += [f"garbage_collection_threshold:{threshold:g}"] if type(threshold) is float and threshold > 0 else []
    return ",".join(options)


def _torch_version(loaded: dict[str, Any], traces: list[Any]) -> str:
    """Identifies the versions of torch by the keys they added."""
    entry = next((trace[-1] for trace in traces if isinstance(trace, list) and trace), None)
    keys = entry.keys() if isinstance(entry, dict) else ()
    block: Any = next(
        (
            segment["blocks"][0]
            for segment in loaded.get("segments", ())
            if isinstance(segment.get("blocks"), list) and segment["blocks"]
        ),
        {},
    )
    if "pool_id" in keys:
        return "2.12 or later"
    if "user_metadata" in keys:
        return "2.10 or 2.11"
    if "compile_context" in keys:
        return "2.8 or 2.9"
    if "external_annotations" in loaded:
        return "2.5 or 2.6" if keys else "2.5 or later"
    if "allocator_settings" in loaded:
        return "2.4"
    if isinstance(block, dict) and block and "address" not in block:
        return "2.0"
    if "time_us" in keys:
        return "2.3"
    return "2.1 or 2.2" if keys or block else ""
