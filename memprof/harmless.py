"""Sanitizes terminal output: text read from files must not move the cursor, set the title or clear the screen."""

from __future__ import annotations

import re
import sys

#: Control characters other than newline and tab, and bidirectional overrides; of escape sequences, color sequences
#: are matched whole.
_CONTROL = re.compile("(\x1b\\[[0-9;]*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def harmless(text: str, *, keeps_colours: bool = False) -> str:
    """Returns lines that are safe to print on a terminal, control characters escaped."""
    return _CONTROL.sub(lambda found: found[0] if keeps_colours and found[1] else ascii(found[0])[1:-1], text)


def notify(sentence: str) -> None:
    """Prints a sentence on stderr, on one line: names in it may contain line breaks."""
    print(harmless(f"memprof: {sentence}").replace("\n", "\\n"), file=sys.stderr)
