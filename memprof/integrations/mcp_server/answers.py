"""Answers short enough for an agent: the largest parts first, with a note of what was left out."""

from __future__ import annotations

import json
from typing import Any

from memprof.errors import UsageError

#: Longest answer, in bytes of UTF-8.
MOST_BYTES = 4096
#: From one try to the next, fewer entries of lists, shorter texts and fewer levels are kept.
_TRIES = ((20, 600, 8), (10, 400, 6), (6, 300, 5), (4, 200, 4), (3, 160, 3), (2, 120, 3), (1, 80, 2), (0, 60, 1))


def encode(value: Any) -> str:
    """Returns a value as JSON, without blanks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def shortened(value: Any, most_bytes: int) -> Any:
    """Returns a value whose JSON has at most so many bytes; lists, texts and levels are cut where it is longer.

    Args:
        value: JSON containers.
        most_bytes: The limit; at least some hundred.
    """
    if _size(value) <= most_bytes:
        return value
    for entries, letters, levels in _TRIES:
        short = _cut(value, entries, letters, levels)
        if _size(short) <= most_bytes:
            return short
    return _kind(value)


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


def _cut(value: Any, entries: int, letters: int, levels: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= letters else f"{value[:letters]}... ({len(value)} characters)"
    if not isinstance(value, dict | list) or not value:
        return value
    if levels == 0:
        return _kind(value)
    if isinstance(value, dict):
        # Some objects are tables, keyed by name.
        kept = list(value.items())[: max(2 * entries, 16)]
        found = {key: _cut(one, entries, letters, levels - 1) for key, one in kept}
        return found | ({"...": f"{len(value) - len(kept)} more"} if len(value) > len(kept) else {})
    shown = [_cut(one, entries, letters, levels - 1) for one in value[:entries]]
    return [*shown, f"... {len(value) - entries} more"] if len(value) > entries else shown


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"[{len(value)} entries]"
    if isinstance(value, dict):
        return f"{{{len(value)} keys}}"
    return f"a {type(value).__name__}"
