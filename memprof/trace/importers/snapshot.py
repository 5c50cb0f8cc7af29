"""Reads a memory snapshot of torch's CUDA allocator: its devices, each with a history and an end state."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memprof.errors import BadInputError
from memprof.trace.importers.allocations import BlockSizes, find_lives, find_reserved
from memprof.trace.importers.columns import (
    SEGMENT_GROWS,
    SEGMENT_SHRINKS,
    Blocks,
    Entries,
    check_dicts,
    keys_of,
    read_annotations,
    read_blocks,
    read_entries,
    read_segments,
)
from memprof.trace.importers.device import HOST, HOST_NAME, DeviceHistory, find_facts
from memprof.trace.importers.frames import StackTable
from memprof.trace.importers.pickles.safe_pickle import RefusedError, load_plain
from memprof.trace.importers.snapshot_events import examine_segments, unknown_keys, with_pools
from memprof.trace.importers.sniff import SNAPSHOT, read_input
from memprof.trace.schema import Ints, Segments

#: Called with the current activity, and the share completed.
Progress = Callable[[str, float], None]

#: Versions of torch by the latest key they added: one of the file, others of its entries.
_VERSIONS = {
    "host_segments": "2.14 or later",
    "pool_id": "2.12 or later",
    "user_metadata": "2.10 or 2.11",
    "compile_context": "2.8 or 2.9",
}
#: Keys of ``allocator_settings`` and the options they are: switches, and sizes in bytes.
_SWITCHES = (
    "expandable_segments",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "graph_capture_record_stream_reuse",
)
_SIZES = {
    "max_split_size": "max_split_size_mb",
    "max_round_threshold": "pinned_max_round_threshold_mb",
    "max_cached_size": "pinned_max_cached_size_mb",
}
#: More devices than any machine has; a longer list is not a list of devices.
_MOST_DEVICES = 1024


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A memory snapshot.

    Attributes:
        devices: Its devices with segments or a history.
        host: The host's pinned memory; None where the file has none of it.
        torch_version: The versions of torch that write such a snapshot, such as ``2.5 or 2.6``.
        settings: The allocator settings the job was given; "" where the file has none.
    """

    devices: tuple[DeviceHistory, ...]
    host: DeviceHistory | None
    torch_version: str
    settings: str


def read_snapshot(
    path: Path,
    data: bytes | None = None,
    on_progress: Progress = lambda what, share: None,
    block_sizes: BlockSizes | None = None,
) -> Snapshot:
    """Reads a snapshot.

    Args:
        path: The file.
        data: Its pickle, where it was read before.
        on_progress: Called from time to time.
        block_sizes: Determines block sizes; the allocator's rounding where left out.

    Raises:
        BadInputError: It is not a snapshot, is damaged, or has invalid content.
    """
    if data is None:
        kind, data = read_input(path)
        if kind != SNAPSHOT:
            raise BadInputError(f"{path} is JSON, such as a profiler trace, not a memory snapshot.")
    with without_collector():
        try:
            loaded = load_plain(data, lambda share: on_progress("checking", share))
        except RefusedError as refusal:
            place = f" (byte {refusal.position:,})" if refusal.position else ""
            raise BadInputError(f"{path} is not a memory snapshot, or is damaged: {refusal.reason}{place}.") from None
        del data
        try:
            return from_plain(loaded, on_progress, block_sizes)
        except BadInputError as error:
            raise BadInputError(f"{path}: {error}") from None


@contextmanager
def without_collector() -> Iterator[None]:
    """Pauses Python's garbage collector, which would take longer over millions of new containers than loading them."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


def from_plain(loaded: Any, on_progress: Progress, block_sizes: BlockSizes | None) -> Snapshot:
    """Reads a snapshot as loaded; otherwise as ``read_snapshot``. Its histories are taken out of it."""
    if isinstance(loaded, list):
        loaded = {"segments": loaded}  # the result of torch.cuda.memory_snapshot(), saved as it is
    if not isinstance(loaded, dict) or not loaded.keys() & {
        "segments",
        "device_traces",
        "host_segments",
        "host_traces",
    }:
        raise BadInputError(
            "it is a pickle, but has no segments and no traces of a device or the host: it is not a memory snapshot."
        )
    segments, traces = loaded.get("segments", []), loaded.get("device_traces", [])
    check_dicts(segments, "the segments")
    if not isinstance(traces, list) or len(traces) > _MOST_DEVICES:
        raise BadInputError("its device_traces are not a list with one history per device.")
    by_device: dict[int, list[Any]] = {}
    for segment in segments:
        number = segment.get("device", 0)
        if type(number) is not int or not 0 <= number < _MOST_DEVICES:
            raise BadInputError("a segment names no device.")
        by_device.setdefault(number, []).append(segment)
    version, settings = _torch_version(loaded, traces), _settings(loaded.get("allocator_settings"))
    annotations, keys = loaded.get("external_annotations"), list(loaded)
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
            devices.append(_device(number, trace, raw, annotations, settings, block_sizes, keys))
        if number < len(traces):
            traces[number] = None  # its entries take most of the memory
    trace, raw = loaded.get("host_traces", []), loaded.get("host_segments", [])
    check_dicts(raw, "the segments of the host")
    host = _device(HOST, trace, raw, annotations, settings, _host_block_sizes, keys) if trace or raw else None
    return Snapshot(tuple(devices), host, "" if cpu is not None else version, settings)


def _cpu_of_profile(traces: list[Any]) -> int | None:
    """Returns the place of the CPU in a history made from a profile, behind all devices; None for other histories."""
    entries = (entry for trace in traces if isinstance(trace, list) for entry in trace[:1])
    is_profile = any(isinstance(entry, dict) and "category" in entry for entry in entries)
    return len(traces) - 1 if is_profile else None


def _profiled_device(number: int, is_cpu: bool, trace: Any, raw: list[Any]) -> DeviceHistory:
    """Reads a device of ``torch.cuda._memory_viz.profile_plot``: its segment spans the addresses, nothing more."""
    stacks, name = StackTable(), "cpu" if is_cpu else f"cuda:{number}"
    entries = read_entries(trace, stacks, f"the history of {name}")
    blocks = read_blocks([one for one in raw if one.get("address") is not None], stacks)
    remarks = ("it was made from a profile: categories are the profiler's own, and reserved memory is unknown.",)
    return DeviceHistory.profiled(number, name, entries, blocks, stacks, remarks=remarks)


def _device(
    number: int,
    trace: Any,
    raw: list[Any],
    annotations: Any,
    settings: str,
    block_sizes: BlockSizes | None,
    keys: list[Any],
) -> DeviceHistory:
    """Reads a device of the allocator's own snapshot; ``keys`` are the keys of the file."""
    is_host, name = number == HOST, "cpu" if number == HOST else f"cuda:{number}"
    stacks = StackTable()
    entries = read_entries(trace, stacks, "the history of the host" if is_host else f"the history of device {number}")
    raw, remarks = examine_segments(raw)
    segments, blocks = read_segments(raw, name), read_blocks(raw, stacks)
    remarks += unknown_keys(
        snapshot=keys,
        segments=keys_of(raw),
        blocks=keys_of(block for segment in raw for block in segment.get("blocks", ())),
        entries=entries.keys,
        frames=keys_of(frame for frame in stacks.read if isinstance(frame, dict)),
    )
    entries = with_pools(entries, segments)
    sizes = None if block_sizes is None else block_sizes(entries, blocks, segments, settings)
    lives, reserved = find_lives(entries, blocks, sizes=sizes), find_reserved(entries, segments)
    all_blocks = sum(len(segment.get("blocks", ())) for segment in raw)
    return DeviceHistory(
        number=number,
        name=name,
        entries=entries,
        segments=segments,
        blocks=blocks,
        annotations=read_annotations(annotations, None if is_host else number),
        stacks=stacks,
        lives=lives,
        reserved=reserved,
        facts=find_facts(HOST_NAME if is_host else name, entries, segments, blocks, all_blocks, lives, reserved),
        remarks=remarks,
    )


def _host_block_sizes(entries: Entries, blocks: Blocks, segments: Segments, settings: str) -> Ints:
    """Returns the block size of each entry about pinned memory: each block is a segment of its own, never split."""
    size_of = dict(zip(segments.address.tolist(), segments.total_size_bytes.tolist(), strict=True))
    found = np.zeros(len(entries), dtype=np.int64)
    for row in range(len(entries) - 1, -1, -1):  # from the end, where every segment is known
        action, address, size = (int(column[row]) for column in (entries.action, entries.address, entries.size))
        if action in SEGMENT_SHRINKS:
            size_of[address] = size
        found[row] = size_of.get(address) or 1 << max(size - 1, 0).bit_length()
        if action in SEGMENT_GROWS:
            size_of.pop(address, None)
    return found


def _settings(raw: Any) -> str:
    if not isinstance(raw, dict):
        return ""
    for key in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if type(raw.get(key)) is str and raw[key]:
            return str(raw[key])
    # Set by the program, not by the environment.
    threshold = raw.get("garbage_collection_threshold")
    options = [f"{name}:True" for name in _SWITCHES if raw.get(name) is True]
    sizes = ((name, raw.get(key)) for key, name in _SIZES.items())
    options += [f"{name}:{size >> 20}" for name, size in sizes if type(size) is int and 0 < size < 2**62]
    options += [f"garbage_collection_threshold:{threshold:g}"] if type(threshold) is float and threshold > 0 else []
    threads, divisions = raw.get("pinned_num_register_threads"), raw.get("roundup_power2_divisions")
    options += [f"pinned_num_register_threads:{threads}"] if type(threads) is int and threads > 1 else []
    steps = divisions.items() if isinstance(divisions, dict) else ()
    kept = [f"{bound}:{count}" for bound, count in steps if type(bound) is str and type(count) is int and count]
    options += [f"roundup_power2_divisions:[{','.join(kept)}]"] if kept else []
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
    for key, version in _VERSIONS.items():
        if key in (loaded if key == "host_segments" else keys):
            return version
    if "external_annotations" in loaded:
        return "2.5 or 2.6" if keys else "2.5 or later"
    if "allocator_settings" in loaded:
        return "2.4"
    if isinstance(block, dict) and block and "address" not in block:
        return "2.0"
    if "time_us" in keys:
        return "2.3"
    return "2.1 or 2.2" if keys or block else ""
