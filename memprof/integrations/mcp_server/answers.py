"""Answers short enough for an agent: the largest parts first, with a note of what was left out."""

from __future__ import annotations

import json
from typing import Any

from memprof.errors import UsageError

#: Longest answer, in bytes of UTF-8.
MOST_BYTES = 4096
#: A part with less room than this is named by its kind alone.
_LEAST_BYTES = 24


def encode(value: Any) -> str:
    """Returns a value as JSON, without blanks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def shortened(value: Any, most_bytes: int) -> Any:
    """Shortens a value until its JSON is within a limit.

    Of a list, the first entries are kept; of an object, every key as far as possible: the small parts whole, and the
    large ones sharing what is left.

    Args:
        value: JSON containers.
        most_bytes: The limit.
    """
    if _size(value) <= most_bytes:
        return value
    short: Any = _kind(value)
    if most_bytes >= _LEAST_BYTES:
        if isinstance(value, str):
            short = _text(value, most_bytes)
        elif isinstance(value, list):
            short = _entries(value, most_bytes)
        elif isinstance(value, dict):
            short = _object(value, most_bytes)
    return short if _size(short) <= most_bytes else _kind(value)


def part_of(value: Any, path: str) -> Any:
    """Returns a part of an answer.

    Args:
        value: JSON containers.
        path: Keys and places, joined by dots, such as ``plans.0.policies``; "" for the whole.

    Raises:
        UsageError: There is no such part.
    """
    walked: list[str] = []
    for key in path.split(".") if path else []:
        where = ".".join(walked) or "the answer"
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            known = f"keys {', '.join(value)}" if isinstance(value, dict) else _kind(value)
            raise UsageError(f"{where} has no {key!r}: it has {known}."[:1000])
        walked.append(key)
    return value


def page_of(value: Any, offset: int) -> Any:
    """Returns a list or a text from an offset on; other values as they are.

    Raises:
        UsageError: The value is neither a list nor a text, and the offset is not 0.
    """
    if isinstance(value, list | str):
        return value[offset:]
    if offset:
        raise UsageError("Only lists and texts have an offset.")
    return value


def _size(value: Any) -> int:
    return len(encode(value).encode())


def _text(value: str, most_bytes: int) -> str:
    end = f"... ({len(value)} characters)"
    kept = value[: max(most_bytes - len(end) - 2, 0)]
    while kept and _size(kept + end) > most_bytes:  # letters of several bytes, and escaped ones
        kept = kept[: -max(1, (_size(kept + end) - most_bytes) // 4)]
    return kept + end


def _entries(value: list[Any], most_bytes: int) -> list[Any]:
    room = most_bytes - 2 - _size(f"... {len(value)} more") - 1
    kept: list[Any] = []
    for one in value:
        # The first entry is shown in any case, later ones only if they fit whole.
        short = shortened(one, room - 1) if not kept else one
        if _size(short) + 1 > room:
            break
        kept.append(short)
        room -= _size(short) + 1
    return [*kept, f"... {len(value) - len(kept)} more"]


def _object(value: dict[str, Any], most_bytes: int) -> dict[str, Any]:
    room = most_bytes - 2
    kept: dict[str, Any] = {}
    for key, one in value.items():  # as many keys as have room for their kind at least
        least = _size(key) + 2 + min(_size(one), _LEAST_BYTES)
        if room - least < (0 if len(kept) + 1 == len(value) else _LEAST_BYTES):
            break
        kept[key] = one
        room -= least
    if len(kept) < len(value):
        kept["..."] = f"{len(value) - len(kept)} more"
    room += sum(min(_size(one), _LEAST_BYTES) for one in kept.values()) - (_LEAST_BYTES if "..." in kept else 0)
    shares: dict[str, int] = {}
    for left, (key, one) in enumerate(sorted(kept.items(), key=lambda item: _size(item[1]))):
        shares[key] = min(_size(one), room // (len(kept) - left))
        room -= shares[key]
    return {key: shortened(one, shares[key]) for key, one in kept.items()}


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"[{len(value)} entries]"
    if isinstance(value, dict):
        return f"{{{len(value)} keys}}"
    return f"a {type(value).__name__}"
