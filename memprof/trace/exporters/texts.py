"""Texts of a recording as other tools can read them."""

from __future__ import annotations


def whole_text(text: str) -> str:
    """Returns a text without halves of characters, which names of files may hold and UTF-8 has no place for: each is ?.

    Perfetto refuses a whole file for one of them, even escaped.
    """
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
