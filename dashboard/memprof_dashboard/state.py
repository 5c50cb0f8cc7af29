"""The view: recording, range and moment; encoded in the URL, so that a link restores it."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

#: Longest text accepted from a URL; a plan names modules.
_LONGEST, _LONGEST_PLAN = 200, 2_000
_LARGEST = 2**53
_NUMBER = re.compile(r"-?[0-9]{1,20}")


@dataclass(frozen=True)
class View:
    """The current view. Positions are rows of the recording's operators.

    Attributes:
        trace: Place of the recording among those opened.
        rank: Its rank; -1 for the one with the highest peak.
        tab: Name of the page below the timeline, as in ``pages.PAGES``; for an unknown name, the default page is shown.
        first: First operator shown; -1 for the recording's own choice.
        end: End of the visible range (exclusive).
        at: The operator under the cursor; -1 for the peak.
        other: Place of a second recording to compare with; -1 for none.
        storage: Row of the selected storage; -1 for none.
        find: Search text: part of a module's, operator's or file's name.
        budget: Budget line, as it was typed.
        side: How live memory at the cursor is shown, as in ``side.panel.SHOWN``; for an unknown name, the table.
        by: What it is grouped by, as in ``side.panel.GROUPED``.
        lay: Where the timeline of the second recording is, as in ``views.timelines``; for an unknown value, below.
        plan: The plan drawn over the timeline, as ``whatif.draft.Offer`` writes it; "" for none.
    """

    trace: int = 0
    rank: int = -1
    tab: str = "whatif"
    first: int = -1
    end: int = -1
    at: int = -1
    other: int = -1
    storage: int = -1
    find: str = ""
    budget: str = ""
    side: str = "table"
    by: str = "module"
    lay: str = "below"
    plan: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the fields, ready for a store in the browser."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(fields: Any) -> View:
        """Parses fields sent by the browser; invalid ones take their default."""
        if not isinstance(fields, dict):
            return View()
        return View(**{name: value for name, value in fields.items() if _is_sound(name, value)})

    def to_search(self) -> str:
        """Returns the URL's query string; default values are omitted."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return f"?{urlencode(fields)}" if fields else ""

    @staticmethod
    def from_search(search: Any) -> View:
        """Parses a URL's query string; invalid fields take their default."""
        text = search if isinstance(search, str) else ""
        texts = dict(parse_qsl(text.removeprefix("?")[: 20 * _LONGEST + 3 * _LONGEST_PLAN], keep_blank_values=True))
        defaults = {field.name: field.default for field in dataclasses.fields(View)}
        fields: dict[str, Any] = {}
        for name, text in texts.items():
            if isinstance(defaults.get(name), int):
                fields[name] = int(text) if _NUMBER.fullmatch(text) else None
            else:
                fields[name] = text
        return View.from_json(fields)

    def change(self, /, **fields: Any) -> View:
        """Returns the view with some fields changed; invalid values are ignored."""
        return dataclasses.replace(self, **{name: value for name, value in fields.items() if _is_sound(name, value)})


def _is_sound(name: str, value: Any) -> bool:
    default = next((field.default for field in dataclasses.fields(View) if field.name == name), None)
    if isinstance(default, int):
        return type(value) is int and -1 <= value < _LARGEST
    longest = _LONGEST_PLAN if name == "plan" else _LONGEST
    return isinstance(value, str) and default is not None and len(value) <= longest
