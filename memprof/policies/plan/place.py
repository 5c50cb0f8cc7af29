"""Locates a mistake in a plan file: its line, as far as a line-based scan can find it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Place:
    """A place in a plan file that is being read.

    Attributes:
        name: The file.
        text: Its text, "" where there is none.
        table: The current table, "" for the top level.
        number: Which of the tables of that name, 0 first.
    """

    name: str
    text: str
    table: str = ""
    number: int = 0

    def inside(self, table: str, number: int) -> Place:
        """Returns the place of a table's content."""
        return replace(self, table=table, number=number)

    def at(self, key: str = "") -> str:
        """Names the file and the line of a key, or of the table itself."""
        line = self._line(key)
        return f"{self.name}, line {line}" if line else self.name

    def is_named_in(self, sentence: str) -> bool:
        """Whether a message already names the place of the mistake."""
        return sentence.startswith((f"{self.name}, line", f"{self.name}: "))

    def _line(self, key: str) -> int:
        lines = self.text.splitlines()
        start = 0
        if self.table or key:
            word = re.escape(self.table or key)
            header = re.compile(rf"""\s*(?:\[\[?\s*["']?{word}["']?\s*[\].]|["']?{word}["']?\s*[=.])""")
            found = [number for number, line in enumerate(lines) if header.match(line)]
            if not found:
                return 0
            start = found[min(self.number, len(found) - 1)]
        if self.table and key:
            setting = re.compile(rf"""(?:.*[\s{{,.])?["']?{re.escape(key)}["']?\s*[=.\]]""")
            return next((number + 1 for number in range(start, len(lines)) if setting.match(lines[number])), start + 1)
        return start + 1
