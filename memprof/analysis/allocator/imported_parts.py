"""Imports a snapshot in parts, one at a time: a file of gigabytes is never in memory as a whole."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from memprof.analysis.allocator.imported_blocks import blocks_at_end, imported_block_sizes
from memprof.errors import BadInputError, OutputError, UsageError
from memprof.replay.allocator.blocks import ALLOCATED, FREE, PENDING
from memprof.replay.allocator.window import BlockMap, rewound
from memprof.trace.importers.columns import ALLOC
from memprof.trace.importers.device import DeviceHistory
from memprof.trace.importers.importing import Imported, import_snapshot
from memprof.trace.importers.pickles.pickle_stream import PickleStream
from memprof.trace.importers.pickles.safe_pickle import RefusedError, load_plain
from memprof.trace.importers.snapshot import from_plain

#: The allocator's states of blocks, as torch writes them.
_STATES = {FREE: "inactive", ALLOCATED: "active_allocated", PENDING: "active_pending_free"}
#: A smaller part has hardly a step in it.
LEAST_BYTES = 1 << 20


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
        BadInputError: It is no such pickle, or is damaged.
        UsageError: Several devices have a history and none is chosen, or the one chosen has none.
    """
    with TemporaryDirectory(prefix="memprof-") as folder:
        number, parts, content = _write_parts(path, Path(folder), size, device, on_progress)
        for place in range(len(parts) - 1, -1, -1):
            on_progress("importing", 1 - (place + 1) / len(parts))
            entries = load_plain(parts[place].path.read_bytes())
            content["device_traces"] = [[]] * number + [entries]
            snapshot = from_plain(dict(content), lambda what, share: None, imported_block_sizes)
            del entries, content["device_traces"]
            (history,) = snapshot.devices
            if place:
                stacks = _older_stacks(history, content["segments"]) | parts[place - 1].stacks
                content["segments"] = _segments(history, snapshot.settings, stacks)
            yield place + 1, len(parts), import_snapshot(path, snapshot)


def _write_parts(
    path: Path, folder: Path, size: int, device: int | None, on_progress: Callable[[str, float], None]
) -> tuple[int, list[Part], dict[str, Any]]:
    """Writes the entries of one device to files; returns its number, the files, and the rest of the snapshot."""
    parts: list[Part] = []
    entries: list[dict[str, Any]] = []
    alive: dict[int, Any] = {}
    seen: set[int] = set()
    begun = 0
    try:
        with path.open("rb") as file:
            whole = max(path.stat().st_size, 1)
            stream = PickleStream(file)

            def end_part() -> None:
                nonlocal begun
                parts.append(Part(folder / f"{len(parts)}.pickle", dict(alive)))
                try:
                    with parts[-1].path.open("wb") as target:
                        pickle.dump(entries, target, pickle.HIGHEST_PROTOCOL)
                except OSError as error:
                    raise OutputError(
                        f"parts of {path} cannot be written to {folder.parent} ({error.strerror}): set TMPDIR to a "
                        "folder with as much room as the file has bytes."
                    ) from None
                entries.clear()
                begun = stream.position
                on_progress("splitting", begun / whole)

            for number, entry in stream.entries():
                if device is not None and number != device:
                    continue
                seen.add(number)
                if len(seen) > 1:
                    raise UsageError(f"{path} has histories of devices {', '.join(map(str, seen))}: choose --only.")
                entries.append(entry)
                if entry.get("action") == "alloc":
                    alive[entry.get("addr", 0)] = entry.get("frames")
                elif entry.get("action") in ("free", "free_completed"):
                    alive.pop(entry.get("addr", 0), None)
                if stream.position - begun >= size and whole - stream.position >= size // 2:
                    end_part()
            if entries:
                end_part()
    except RefusedError as refusal:
        raise BadInputError(
            f"{path} cannot be split: {refusal.reason} (byte {refusal.position:,}). Only a pickle can, unpacked."
        ) from None
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror}.") from None
    content = stream.content
    if not seen or not isinstance(content, dict):
        raise BadInputError(f"{path} has no history {'' if device is None else f'of device {device} '}to split.")
    (number,) = seen
    segments = content.get("segments")
    content["segments"] = [one for one in segments if one.get("device", 0) == number] if segments else []
    return number, parts, {key: one for key, one in content.items() if not key.startswith("host_")}


def _older_stacks(history: DeviceHistory, segments: list[dict[str, Any]]) -> dict[int, Any]:
    """Returns the frames of the blocks that were there before a history and are after it, by address."""
    made = set(history.entries.address[history.entries.action == ALLOC].tolist())
    blocks = (block for segment in segments for block in segment.get("blocks", ()))
    return {one["address"]: one.get("frames") for one in blocks if one.get("address", next(iter(made), 0)) not in made}


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
