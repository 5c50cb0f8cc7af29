"""Makes texts of a recording readable by other tools."""

from __future__ import annotations


def whole_text(text: str) -> str:
    """Returns a text with lone surrogates, which file names may hold and UTF-8 cannot encode, replaced by ?.

    Perfetto rejects a whole file for a single one, even escaped.
    """
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
