"""Colours and hatchings: of categories, of phases, and of the page in light and in dark."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memprof.phases import in_order


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
    "parameter": Fill("parameters", "#0072B2"),
    "buffer": Fill("buffers", "#0072B2", "."),
    "optimizer_state": Fill("optimizer state", "#56B4E9"),
    "gradient": Fill("gradients", "#009E73"),
    "input": Fill("inputs", "#CC79A7"),
    "activation": Fill("activations", "#E69F00"),
    "collective": Fill("collectives", "#000000", "x"),
    "temporary": Fill("temporaries", "#F0E442"),
    "workspace": Fill("kernel workspace", "#D55E00", "\\"),
    "unknown": Fill("uncategorized", "#999999", "/"),
}

#: Colours of the recorder's own phases, from the palette of Okabe and Ito.
PHASE_COLOURS = {
    "forward": "#56B4E9",
    "backward": "#E69F00",
    "optimizer": "#009E73",
    "evaluation": "#CC79A7",
    "saving": "#0072B2",
    "loading": "#F0E442",
    "other": "#BBBBBB",
}
#: Colours of user-named phases, in order; as distinct from the others as possible, also for the colour-blind.
_OWN_COLOURS = ("#8844EE", "#AAEE88", "#668844", "#66EEAA", "#8888EE")
#: Display name and colour of recomputed operators in any phase.
RECOMPUTED, RECOMPUTED_COLOUR = "recomputed", "#D55E00"


@dataclass(frozen=True)
class Theme:
    """Colours of a figure's frame.

    Attributes:
        name: ``light`` or ``dark``.
        ink: Text and the line of the total.
        faint: Grid lines and separators.
        paper: What lies behind labels.
        accent: The cursor.
        alarm: Budget and capacity.
    """

    name: str
    ink: str
    faint: str
    paper: str
    accent: str
    alarm: str


THEMES = {
    "light": Theme("light", "#1b1f24", "#d7dce1", "#ffffff", "#8250df", "#b3261e"),
    "dark": Theme("dark", "#e6e9ec", "#3a4149", "#161a1e", "#c9a7ff", "#ff8a80"),
}


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
