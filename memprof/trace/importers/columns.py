"""A snapshot's history, end state and annotations as validated columns, one set per device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from memprof.errors import BadInputError
from memprof.trace.importers.frames import NO_STACK, Stack, StackTable, metadata_text, text_of
from memprof.trace.schema import ACTIONS, NONE, Bools, Floats, Ints, Segments

#: Action codes: indices into the schema's list; actions not listed there are dropped.
_CODES = {name: place for place, name in enumerate(ACTIONS)}
ALLOC, FREE, FREE_REQUESTED, FREE_COMPLETED = (
    _CODES[name] for name in ("alloc", "free", "free_requested", "free_completed")
)
SEGMENT_GROWS = (_CODES["segment_alloc"], _CODES["segment_map"])
SEGMENT_SHRINKS = (_CODES["segment_free"], _CODES["segment_unmap"])
OOM, ANNOTATE = _CODES["oom"], _CODES["annotate"]

#: What torch writes outside torch.compile.
_NO_CONTEXT = "N/A"

#: Categories of torch's profiler, which ``torch.cuda._memory_viz.profile_plot`` adds to a history.
_CATEGORIES = {
    "parameter": "parameter",
    "optimizer_state": "optimizer_state",
    "input": "input",
    "temporary": "temporary",
    "activation": "activation",
    "gradient": "gradient",
    "autograd_detail": "temporary",
}

#: The key of the default (unowned) pool.
_DEFAULT_POOL = (0, 0)


@dataclass(frozen=True, eq=False)
class Entries:
    """The history of one device, in its own order; each column of shape ``(entries,)``.

    Attributes:
        action: Action code, an index into ``schema.ACTIONS``.
        address: Address; for oom entries the free bytes.
        size: Requested bytes.
        stream: Stream.
        time_us: Unix time; NaN where the file has none.
        pool: Pool of each, "" for the default.
        stacks: Stack of each.
        compile_context: What torch.compile was doing, "" for nothing.
        user_metadata: What the job noted, a dictionary as JSON; "" for none.
        internal_metadata: What the allocator noted of the few entries that have it, by row.
        category: Category of what each allocates, "" for other entries; None where the file has no categories.
        keys: Keys of the entries as loaded.
        unknown: How many entries were dropped, by action unknown to the supported versions of torch.
    """

    action: Ints
    address: Ints
    size: Ints
    stream: Ints
    time_us: Floats
    pool: list[str]
    stacks: list[Stack]
    unknown: dict[str, int]
    compile_context: list[str]
    user_metadata: list[str]
    internal_metadata: dict[int, str]
    category: list[str] | None = None
    keys: frozenset[Any] = frozenset()

    def __len__(self) -> int:
        return len(self.action)

    @classmethod
    def plain(
        cls,
        action: Ints,
        address: Ints,
        size: Ints,
        time_us: Floats,
        stacks: list[Stack],
        category: list[str] | None = None,
    ) -> Entries:
        """Returns entries on one stream and in the default pool, without remarks."""
        stream, none = np.zeros(len(size), dtype=np.int64), [""] * len(size)
        return cls(action, address, size, stream, time_us, none, stacks, {}, none, none, {}, category)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of a device in use at the end; each column of shape ``(blocks,)``.

    Attributes:
        address: First byte.
        size: Allocated bytes.
        requested: Requested bytes.
        is_pending: Already freed, but in use by another stream.
        stacks: Allocation stack of each.
    """

    address: Ints
    size: Ints
    requested: Ints
    is_pending: Bools
    stacks: list[Stack]

    def __len__(self) -> int:
        return len(self.address)

    @classmethod
    def of_sizes(cls, size: Ints) -> Blocks:
        """Returns blocks of which nothing but the size is known."""
        nowhere, is_pending = np.full(len(size), NONE, dtype=np.int64), np.zeros(len(size), dtype=np.bool_)
        return cls(nowhere, size, size, is_pending, [NO_STACK] * len(size))


@dataclass(frozen=True)
class Annotation:
    """The start or end of a named time span.

    Attributes:
        name: Such as ``Optimizer.step#AdamW.step``.
        is_start: It is the start; else the end.
        time_us: Time.
    """

    name: str
    is_start: bool
    time_us: float


def read_entries(raw: Sequence[Any], stacks: StackTable, what: str) -> Entries:
    """Reads the history of one device.

    Raises:
        BadInputError: An entry is not a dict, or a value has the wrong type.
    """
    check_dicts(raw, what)
    actions = [one.get("action", "") for one in raw]
    unknown: dict[str, int] = {}
    if set(map(type, actions)) - {str} or set(actions) - _CODES.keys():
        names = [text_of(action) for action in actions]
        for name in names:
            if name not in _CODES:
                unknown[name] = unknown.get(name, 0) + 1
        kept = [place for place, name in enumerate(names) if name in _CODES]
        raw, actions = [raw[place] for place in kept], [names[place] for place in kept]
    keys = keys_of(raw)
    column = partial(_column, raw, keys)
    remarked = [row for row, one in enumerate(raw) if "internal_metadata" in one] if "internal_metadata" in keys else []
    address = column("addr", None)
    if None in address:
        address = [raw[place].get("device_free", 0) if one is None else one for place, one in enumerate(address)]
    found = stacks.stacks(column("frames", None))
    if "forward_frames" in keys:
        found = [
            stacks.with_forward(stack, one["forward_frames"]) if "forward_frames" in one else stack
            for stack, one in zip(found, raw, strict=True)
        ]
    return Entries(
        action=np.fromiter(map(_CODES.__getitem__, actions), np.int64, len(raw)),
        address=whole_numbers(address, f"the addresses of {what}"),
        size=whole_numbers(column("size", 0), f"the sizes of {what}", lowest=0),
        stream=whole_numbers(column("stream", 0), f"the streams of {what}"),
        time_us=_moments(column("time_us", None), f"the times of {what}"),
        pool=_pools(column("pool_id", None)),
        stacks=found,
        unknown=unknown,
        compile_context=_contexts(_texts(column("compile_context", ""))),
        user_metadata=_texts(column("user_metadata", "")),
        internal_metadata={row: metadata_text(raw[row]["internal_metadata"]) for row in remarked},
        category=_categories(raw) if "category" in keys else None,
        keys=keys,
    )


def read_segments(raw: Sequence[Any], device: str) -> Segments:
    """Reads the segments of one device.

    Raises:
        BadInputError: A value has the wrong type.
    """

    def number(key: str, default: Callable[[dict[str, Any]], Any] = lambda segment: 0) -> Ints:
        values = [segment[key] if key in segment else default(segment) for segment in raw]
        return whole_numbers(values, f"{key} of the segments")

    texts: dict[Any, str] = {}
    return Segments.of(
        device=[device] * len(raw),
        address=number("address"),
        total_size_bytes=number("total_size"),
        allocated_size_bytes=number("allocated_size"),
        active_size_bytes=number("active_size"),
        requested_size_bytes=number("requested_size", _requested),
        stream=number("stream"),
        segment_type=["small" if segment.get("segment_type") == "small" else "large" for segment in raw],
        segment_pool=[_pool(segment.get("segment_pool_id"), texts) for segment in raw],
        is_expandable=[segment.get("is_expandable") is True for segment in raw],
    )


def read_blocks(raw: Sequence[Any], stacks: StackTable) -> Blocks:
    """Reads the blocks in use in some segments; blocks without an address are contiguous.

    Raises:
        BadInputError: A value has the wrong type.
    """
    address, size, requested, is_pending, stack_of = [], [], [], [], []
    for position, length, block in placed_blocks(raw):
        state = block.get("state")
        if state in ("active_allocated", "active_pending_free", "active_awaiting_free"):
            address.append(position)
            size.append(length)
            requested.append(_block_requested(block, length))
            is_pending.append(state != "active_allocated")
            stack_of.append(_block_stack(block, stacks))
    return Blocks(
        address=whole_numbers(address, "the addresses of the blocks"),
        size=whole_numbers(size, "the sizes of the blocks", lowest=0),
        requested=whole_numbers(requested, "the sizes of the blocks", lowest=0),
        is_pending=np.array(is_pending, dtype=np.bool_),
        stacks=stack_of,
    )


def placed_blocks(raw: Iterable[dict[str, Any]]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yields each block of some segments after its address and size; raises as ``read_blocks``."""
    for segment in raw:
        blocks = segment.get("blocks", [])
        check_dicts(blocks, "the blocks of a segment")
        position = _whole(segment.get("address", 0))
        for block in blocks:
            length = _whole(block.get("size", 0))
            position = _whole(block.get("address", position))
            yield position, length, block
            position += length


def read_annotations(raw: Any, device: int | None) -> list[Annotation]:
    """Reads the annotations of one device, those of every device for None; malformed ones are dropped."""
    found = []
    for one in raw if isinstance(raw, list) else []:
        if not isinstance(one, dict) or one.get("stage") not in ("START", "END"):
            continue
        if device is not None and one.get("device", device) != device:
            continue
        moment = one.get("time_us")
        if isinstance(moment, int | float) and not isinstance(moment, bool) and 0 <= moment < 2**62:
            found.append(Annotation(text_of(one.get("name")), one["stage"] == "START", float(moment)))
    return sorted(found, key=lambda one: one.time_us)


def keys_of(raw: Iterable[dict[Any, Any]]) -> frozenset[Any]:
    """Returns every key of some dicts."""
    return frozenset(chain.from_iterable(raw))


def check_dicts(raw: Any, what: str) -> None:
    """Checks that a value is a list of dicts.

    Raises:
        BadInputError: It is not.
    """
    if not isinstance(raw, list):
        raise BadInputError(f"{what} must be a list, not {_kind(raw)}: this is not a memory snapshot.")
    kinds = set(map(type, raw))
    if not kinds <= {dict}:
        wrong = next(item for item in raw if type(item) is not dict)
        raise BadInputError(f"among {what} is {_kind(wrong)} instead of a dict: this is not a memory snapshot.")


def whole_numbers(values: Sequence[Any], what: str, lowest: int | None = None) -> Ints:
    """Returns integers as a column.

    Raises:
        BadInputError: A value is not an integer, is too large, or is below ``lowest``.
    """
    if not set(map(type, values)) <= {int}:
        wrong = next(value for value in values if type(value) is not int)
        raise BadInputError(f"among {what} is {_kind(wrong)} instead of a whole number: this is not a memory snapshot.")
    try:
        column = np.fromiter(values, np.int64, len(values))
    except OverflowError:
        largest = max(values, key=abs)
        raise BadInputError(f"among {what} is {largest}, which is more than 63 bits hold.") from None
    if lowest is not None and len(column) and int(column.min()) < lowest:
        raise BadInputError(f"among {what} is {int(column.min())}, which is below {lowest}.")
    # Their sums must fit too.
    if lowest is not None and len(column) and float(column.sum(dtype=np.float64)) > 2.0**62:
        raise BadInputError(f"{what} sum to more than 62 bits hold.")
    return column


def _moments(values: Sequence[Any], what: str) -> Floats:
    kinds = set(map(type, values))
    if kinds <= {type(None)}:
        return np.full(len(values), np.nan)
    whole_numbers(values if kinds == {int} else [one for one in values if type(one) not in (float, type(None))], what)
    moments = np.array([np.nan if one is None else one for one in values] if type(None) in kinds else values, float)
    return np.where(np.abs(moments) < 2.0**62, moments, np.nan)


def _categories(raw: Sequence[Any]) -> list[str]:
    return [_CATEGORIES.get(text_of(one.get("category")), "unknown" if "category" in one else "") for one in raw]


def _column(raw: Sequence[Any], keys: frozenset[Any], key: str, missing: Any) -> list[Any]:
    """Returns the values of dicts, which have some keys, under one."""
    if key not in keys:
        return [missing] * len(raw)
    try:
        return list(map(itemgetter(key), raw))  # twice as fast as dict.get, and nearly always sufficient
    except KeyError:
        return [one.get(key, missing) for one in raw]


def _contexts(contexts: list[str]) -> list[str]:
    running = {context: context.replace(_NO_CONTEXT, "") for context in set(contexts)}
    return list(map(running.__getitem__, contexts))


def _texts(values: list[Any]) -> list[str]:
    return values if set(map(type, values)) <= {str} else list(map(metadata_text, values))


def _pools(values: Sequence[Any]) -> list[str]:
    kinds, texts = set(map(type, values)), dict[Any, str]()
    if kinds <= {tuple}:  # of whole numbers, as in every pickle that is loaded
        known = {one: _pool(one, texts) for one in set(values)}
        return list(map(known.__getitem__, values))
    return [""] * len(values) if kinds <= {type(None)} else [_pool(one, texts) for one in values]


def _pool(value: Any, texts: dict[Any, str]) -> str:
    """Formats a pool as text, "" for the default; pools repeat, so each is formatted once."""
    if value is None or value == _DEFAULT_POOL:
        return ""
    if not isinstance(value, tuple | list) or not all(type(part) is int for part in value):
        return ""
    key = tuple(value)
    if key not in texts:
        texts[key] = "" if key == _DEFAULT_POOL else ",".join(map(str, key))
    return texts[key]


def _requested(segment: dict[str, Any]) -> int:
    """Sums the requested bytes of a segment that does not report them, as in torch 2.0."""
    blocks = segment.get("blocks", [])
    check_dicts(blocks, "the blocks of a segment")
    return sum(
        _block_requested(block, _whole(block.get("size", 0)))
        for block in blocks
        if text_of(block.get("state")).startswith("active")
    )


def _block_requested(block: dict[str, Any], size: int) -> int:
    if "requested_size" in block:
        return _whole(block["requested_size"])
    history = _first_history(block)
    return _whole(history.get("real_size", size))


def block_frames(block: dict[str, Any]) -> Any:
    """Returns the frames of a block; before torch 2.1 they are in its history."""
    return block["frames"] if "frames" in block else _first_history(block).get("frames")


def _block_stack(block: dict[str, Any], stacks: StackTable) -> Stack:
    frames = block_frames(block)
    stack = stacks.stack(frames) if frames else NO_STACK
    return stacks.with_forward(stack, block["forward_frames"]) if "forward_frames" in block else stack


def _first_history(block: dict[str, Any]) -> dict[str, Any]:
    history = block.get("history")
    return history[0] if isinstance(history, list) and history and isinstance(history[0], dict) else {}


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise BadInputError(f"a block holds {_kind(value)} instead of a whole number: this is not a memory snapshot.")
    return value


def _kind(value: Any) -> str:
    kinds = {dict: "a dict", list: "a list", str: "a text", int: "a number", float: "a fraction", tuple: "a tuple"}
    return "nothing" if value is None else kinds.get(type(value), type(value).__name__)
