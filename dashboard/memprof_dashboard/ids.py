"""Ids of components used by more than one file."""

from __future__ import annotations

#: The address bar.
URL = "url"
#: The current state.View as JSON. Everything else is derived from it.
VIEW = "view"
#: Parts of VIEW, each changed only when its own fields change: what the timeline shows, where the cursor is, and which
#: page of which recording stands below.
WINDOW = "window"
CURSOR = "cursor"
PLACE = "place"
#: A key press, and a jump requested by a page: fields of View to change.
KEY = "key"
GO = "go"
#: The last zoom: its range, of what, and a count, which VIEW has once it has the range.
ZOOMED = "zoomed"
#: Cursor position in the timeline drawn last; None without a cursor.
DRAWN_AT = "drawn-at"
#: Number of dry runs that have ended: plans are predicted again from them.
DRY = "dry"
#: All of these, which the page keeps.
STORES = (VIEW, WINDOW, CURSOR, PLACE, KEY, GO, ZOOMED, DRAWN_AT, DRY)
#: ``light`` or ``dark``.
THEME = "theme"
#: Ticks while a recording is in progress; counts its refreshes.
TICK = "tick"
LIVE = "live"

#: Looks for new runs next to the recordings; counts those found.
NEW_RUNS = "new-runs"
RUNS = "runs"

HEADER = "header"
RECORDINGS = "recordings"
TRACE = "trace"
RANK = "rank"
OTHER = "other"
FIND = "find"
BUDGET = "budget"
TABS = "tabs"
PANEL = "panel"
OVERVIEW = "overview"
TIMELINE = "timeline"
TIMELINE_OTHER = "timeline-other"
READOUT = "readout"
NOTE = "note"
FACTS = "facts"
DOWNLOAD = "download"
DOWNLOAD_BUTTON = "download-button"
PNG_BUTTON = "png-button"
THEME_BUTTON = "theme-button"
PEAK_BUTTON = "peak-button"
ALL_BUTTON = "all-button"
IN_BUTTON = "in-button"
OUT_BUTTON = "out-button"
TIMELINE_TABLE = "timeline-table"
SIDE = "side"
BY = "by"
LAY = "lay"
AXIS = "axis"
#: Rows of the table of live tensors that the browser asks for as it is scrolled or sorted.
MORE = "more"
HELP = "help"
HELP_BUTTON = "help-button"
SWAP_BUTTON = "swap-button"
BADGE = "badge"
PHASES = "phases"
