"""Imports a snapshot in parts, so that gigabytes are never in memory at once, and sizes the blocks of any snapshot."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from memprof.errors import BadInputError, OutputError, UsageError
from memprof.policies.allocator.policy import parse_options
from memprof.replay.allocator.blocks import ALLOCATED, FREE, PENDING
from memprof.replay.allocator.recorded_requests import block_sizes
from memprof.replay.allocator.rules import Settings, settings_from_options
from memprof.replay.allocator.window import BlockMap, Range, rewound
from memprof.trace.files.place import cannot_write
from memprof.trace.importers.columns import ALLOC, Blocks, Entries, block_frames, placed_blocks
from memprof.trace.importers.device import HOST, HOST_NAME, DeviceHistory
from memprof.trace.importers.importing import Imported, import_snapshot
from memprof.trace.importers.pickles.pickle_stream import PickleStream
from memprof.trace.importers.pickles.safe_pickle import RefusedError, load_plain
from memprof.trace.importers.snapshot import from_plain
from memprof.trace.schema import ACTIONS, AllocatorEvents, Ints, Segments

#: The allocator's states of blocks, as torch writes them.
_STATES = {FREE: "inactive", ALLOCATED: "active_allocated", PENDING: "active_pending_free"}
#: A smaller part has hardly a step in it.
LEAST_BYTES = 1 << 20
#: Bytes of all parts, each with the stacks that it refers to, per byte of the file.
_MOST_PER_BYTE = 16


@dataclass(frozen=True)
class Part:
    """A part of a history, written to a file of its own.

    Attributes:
        path: The file, with its entries.
        stacks: Frames of the blocks that are alive after its last entry, by address.
    """

    path: Path
    stacks: dict[int, Any]


def import_parts(
    path: Path, size: int, device: int | None, on_progress: Callable[[str, float], None]
) -> Iterator[tuple[int, int, Imported]]:
    """Imports a snapshot in parts, the last one first: what each ends with follows from what comes after it.

    Args:
        path: A snapshot's pickle, as torch writes it.
        size: Bytes of the file in each part, at least LEAST_BYTES.
        device: The device; where left out, the only one with a history.
        on_progress: Called with the current activity and the share completed.

    Yields:
        The number of each part, from 1 on, how many there are, and what ``import_file`` returns of it.

    Raises:
        BadInputError: It is no such pickle, is damaged, or has no history of the device.
        OutputError: The temporary folder cannot be written.
        UsageError: Several devices have a history and none is chosen, the host is, or the parts are too small.
    """
    if device == HOST:
        raise UsageError(f"--split takes the history of a device: import --only {HOST_NAME} without it.")
    with _translated():
        temporary = TemporaryDirectory(prefix="memprof-")
    with temporary as folder:
        number, parts, content = _write_parts(path, Path(folder), size, device, on_progress)
        for place in range(len(parts) - 1, -1, -1):
            on_progress("importing", 1 - (place + 1) / len(parts))
            try:
                content["device_traces"] = [[]] * number + [load_plain(parts[place].path.read_bytes())]
                snapshot = from_plain(dict(content), lambda what, share: None, imported_block_sizes)
            except RefusedError as refusal:
                raise BadInputError(f"{path} cannot be split: {refusal.reason}.") from None
            except BadInputError as error:
                raise BadInputError(f"{path}: {error}") from None
            del content["device_traces"]
            (history,) = snapshot.devices
            if place:
                stacks = _older_stacks(history, content["segments"]) | parts[place - 1].stacks
                content["segments"] = _segments(history, snapshot.settings, stacks)
            yield place + 1, len(parts), import_snapshot(path, snapshot)


@contextmanager
def _translated() -> Iterator[None]:
    """Converts what the system says of the temporary folder."""
    try:
        yield
    except OSError as error:
        raise cannot_write("the temporary folder", error, "Set TMPDIR to one with more room.") from None


def _write_parts(
    path: Path, folder: Path, size: int, device: int | None, on_progress: Callable[[str, float], None]
) -> tuple[int, list[Part], dict[str, Any]]:
    """Writes the entries of one device to files; returns its number, the files, and the rest of the snapshot."""
    parts: list[Part] = []
    entries: list[dict[str, Any]] = []
    alive: dict[int, Any] = {}
    seen: set[int] = set()
    begun = written = 0
    try:
        with path.open("rb") as file:
            whole = max(path.stat().st_size, 1)
            stream = PickleStream(file)

            def end_part() -> None:
                nonlocal begun, written
                parts.append(Part(folder / f"{len(parts)}.pickle", dict(alive)))
                with _translated(), parts[-1].path.open("wb") as target:
                    pickle.dump(entries, target, pickle.HIGHEST_PROTOCOL)
                    written += target.tell()
                if written > _MOST_PER_BYTE * (max(whole, stream.position) + LEAST_BYTES):
                    raise UsageError(f"{path} takes {_MOST_PER_BYTE} times its bytes in parts: name a larger --split.")
                entries.clear()
                begun = stream.position
                on_progress("splitting", begun / whole)

            for number, entry in stream.entries():
                if device is not None and number != device:
                    continue
                seen.add(number)
                if len(seen) > 1:
                    raise UsageError(f"{path} has several devices, such as {min(seen)} and {max(seen)}: choose --only.")
                entries.append(entry)
                address = entry["addr"] if type(entry.get("addr")) is int else 0  # refused when its part is read
                if entry.get("action") == "alloc":
                    alive[address] = entry.get("frames")
                elif entry.get("action") in ("free", "free_completed"):
                    alive.pop(address, None)
                if stream.position - begun >= size and whole - stream.position >= size // 2:
                    end_part()
            if entries:
                end_part()
    except RefusedError as refusal:
        raise BadInputError(
            f"{path} cannot be split: {refusal.reason} (byte {refusal.position:,}). Only a pickle can, unpacked."
        ) from None
    except RecursionError:
        raise BadInputError(f"{path} cannot be split: its containers are nested too deeply.") from None
    except OutputError:  # it is also an OSError
        raise
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror}.") from None
    content = stream.content
    if not seen or not isinstance(content, dict):
        raise BadInputError(f"{path} has no history {'' if device is None else f'of device {device} '}to split.")
    (number,) = seen
    if type(segments := content.setdefault("segments", [])) is list:
        content["segments"] = [one for one in segments if type(one) is not dict or one.get("device", 0) == number]
    return number, parts, {key: one for key, one in content.items() if not key.startswith("host_")}


def _older_stacks(history: DeviceHistory, segments: list[dict[str, Any]]) -> dict[int, Any]:
    """Returns the frames of the blocks that were there before a history and are after it, by address."""
    made = set(history.entries.address[history.entries.action == ALLOC].tolist())
    return {address: block_frames(one) for address, _, one in placed_blocks(segments) if address not in made}


def _segments(history: DeviceHistory, settings: str, stacks: dict[int, Any]) -> list[dict[str, Any]]:
    """Returns the segments before a history, as torch writes them."""
    events, end, rules = blocks_at_end(history.entries, history.blocks, history.segments, settings)
    start: BlockMap = rewound(events, end, rules)
    found = []
    for one in start.ranges:
        blocks: list[dict[str, Any]] = [
            {
                "address": address,
                "size": size,
                "requested_size": requested,
                "state": _STATES[state],
                "frames": stacks.get(address) or [],
            }
            for address, size, requested, state in start.blocks_of(one, one.size)
        ]
        in_use = [block for block in blocks if block["state"] != "inactive"]
        found.append(
            {
                "device": history.number,
                "address": one.address,
                "total_size": one.size,
                "allocated_size": sum(block["size"] for block in in_use if block["state"] == "active_allocated"),
                "active_size": sum(block["size"] for block in in_use),
                "requested_size": sum(block["requested_size"] for block in in_use),
                "stream": one.stream,
                "segment_type": "small" if one.is_small else "large",
                "is_expandable": one.is_expandable,
                "blocks": blocks,
            }
        )
    return found


def imported_block_sizes(entries: Entries, blocks: Blocks, segments: Segments, options: str) -> Ints:
    """Returns the block size of each entry that allocates or frees, 0 where unknown, shape ``(entries,)``.

    Args:
        entries: The history of one device.
        blocks: Its blocks in use at the end.
        segments: Its segments at the end.
        options: The allocator's options; ignored where torch would not accept them.
    """
    return block_sizes(*blocks_at_end(entries, blocks, segments, options))


def blocks_at_end(
    entries: Entries, blocks: Blocks, segments: Segments, options: str
) -> tuple[AllocatorEvents, BlockMap, Settings]:
    """Returns the events of a device, its blocks after the last, and the settings; arguments as above."""
    try:
        settings = settings_from_options(parse_options(options))
    except ValueError:
        settings = Settings()
    order = np.argsort(blocks.address, kind="stable")
    ranges = [
        Range(address, size, stream, 0, kind == "small", grows)
        for address, size, stream, kind, grows in zip(
            segments.address.tolist(),
            segments.total_size_bytes.tolist(),
            segments.stream.tolist(),
            segments.segment_type.tolist(),
            segments.is_expandable.tolist(),
            strict=True,
        )
    ]
    end = BlockMap(
        ranges,
        blocks.address[order],
        blocks.size[order],
        blocks.requested[order],
        np.where(blocks.is_pending[order], PENDING, ALLOCATED),
    )
    events = AllocatorEvents.of(
        action=np.array(ACTIONS, dtype=object)[entries.action],
        address=entries.address,
        size_bytes=entries.size,
        stream=entries.stream,
    )
    return events, end, settings
