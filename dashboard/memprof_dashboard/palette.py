"""Colours and hatchings: of categories, of phases, and of the page in light and in dark."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memprof.phases import in_order
from memprof.trace.schema import CATEGORY_LABELS


@dataclass(frozen=True)
class Fill:
    """Style of one category's area. The pattern distinguishes areas without colour.

    Attributes:
        label: Display name of the category.
        colour: From the colour-blind-safe palette of Okabe and Ito.
        pattern: Plotly's name of a hatching; empty for a plain area.
    """

    label: str
    colour: str
    pattern: str = ""


#: Categories from bottom to top: those alive for the whole step lie below transient ones.
FILLS = {
    category: Fill(CATEGORY_LABELS[category], colour, pattern)
    for category, colour, pattern in (
        ("parameter", "#0072B2", ""),
        ("buffer", "#0072B2", "."),
        ("optimizer_state", "#56B4E9", ""),
        ("gradient", "#009E73", ""),
        ("input", "#CC79A7", ""),
        ("activation", "#E69F00", ""),
        ("collective", "#8C564B", "x"),
        ("temporary", "#F0E442", ""),
        ("workspace", "#D55E00", "\\"),
        ("unknown", "#999999", "/"),
    )
}

#: Colours of the recorder's own phases: muted, none of them a category's, any two apart for the colour-blind as well.
PHASE_COLOURS = {
    "forward": "#b5c7dd",
    "backward": "#5c7097",
    "optimizer": "#7ba89b",
    "evaluation": "#b590dd",
    "saving": "#a17c2b",
    "loading": "#f3d395",
    "other": "#796b79",
}
#: Colours of user-named phases, in order; as distinct from the others as possible, also for the colour-blind.
_OWN_COLOURS = ("#c57062", "#85d4a9", "#65375e", "#f0eddf", "#91562e")
#: Display name and colour of recomputed operators in any phase.
RECOMPUTED, RECOMPUTED_COLOUR = "recomputed", "#9a3546"


@dataclass(frozen=True)
class Theme:
    """Colours of a figure's frame.

    Attributes:
        name: ``light`` or ``dark``.
        ink: Text and the line of the total.
        faint: Grid lines and separators.
        soft: Secondary text and buttons.
        paper: What lies behind labels.
        accent: The cursor.
        alarm: Budget and capacity.
    """

    name: str
    ink: str
    faint: str
    soft: str
    paper: str
    accent: str
    alarm: str


THEMES = {
    "light": Theme("light", "#16202c", "#dde3ea", "#56616f", "#ffffff", "#6d3fd1", "#b3261e"),
    "dark": Theme("dark", "#e8ecf1", "#2f3742", "#9eabba", "#12161c", "#bb9bff", "#ff8a80"),
}


def ink_on(colour: str) -> str:
    """Returns black or white, whichever is read more easily on a colour such as ``#5c7097``."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#10151b" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def phase_colours(phases: Iterable[str]) -> dict[str, str]:
    """Returns the colour of each phase present, in listing order."""
    listed = in_order(phases)
    own = [name for name in listed if name not in PHASE_COLOURS]
    colours = {name: _OWN_COLOURS[place % len(_OWN_COLOURS)] for place, name in enumerate(own)}
    return {name: PHASE_COLOURS.get(name) or colours[name] for name in listed}


def fill_of(category: str) -> Fill:
    """Returns the style of a category; one unknown to this version (from a newer trace) is styled as uncategorized."""
    unknown = FILLS["unknown"]
    return FILLS.get(category, Fill(category, unknown.colour, unknown.pattern))
