"""The last gate before a terminal: what is read off files must not move its cursor, set its title or clear it."""

from __future__ import annotations

import re
import sys

#: Control characters but the end of a line and the tabulator, and what turns the direction of a line round; of escape
#: sequences, those that colour are matched whole.
_CONTROL = re.compile("(\x1b\\[[0-9;]*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def harmless(text: str, *, keeps_colours: bool = False) -> str:
    """Returns lines as a terminal may have them, control characters written out.

    Args:
        text: Lines.
        keeps_colours: Sequences that colour text are left in.
    """
    return _CONTROL.sub(lambda found: found[0] if keeps_colours and found[1] else ascii(found[0])[1:-1], text)


def tell(sentence: str) -> None:
    """Prints a sentence on stderr, on one line: names in it may hold line breaks."""
    print(harmless(f"memprof: {sentence}").replace("\n", "\\n"), file=sys.stderr)
