"""Colours and hatchings: of categories, of phases, and of the page in light and in dark."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memprof.phases import in_order


@dataclass(frozen=True)
class Fill:
    """How the area of one category looks. The pattern tells areas apart where colour does not.

    Attributes:
        label: The category as people read it.
        colour: From the palette of Okabe and Ito, which colour-blind people can tell apart.
        pattern: Plotly's name of a hatching; empty for a plain area.
    """

    label: str
    colour: str
    pattern: str = ""


#: Categories from the bottom of the picture to its top: what stays for the whole step lies below what comes and goes.
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
    "unknown": Fill("unknown", "#999999", "/"),
}

#: Phases: those that the recorder tells, from the palette of Okabe and Ito.
PHASE_COLOURS = {
    "forward": "#56B4E9",
    "backward": "#E69F00",
    "optimizer": "#009E73",
    "evaluation": "#CC79A7",
    "saving": "#0072B2",
    "loading": "#F0E442",
    "other": "#BBBBBB",
}
#: Those that a job names, in turn; chosen to lie as far from the others as can be, also for the colour-blind.
_OWN_COLOURS = ("#8844EE", "#AAEE88", "#668844", "#66EEAA", "#8888EE")
#: Operators of any phase that recompute what was dropped, and what a reader sees them called.
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
    """Returns the colour of each phase that there is, in the order in which phases are listed."""
    listed = in_order(phases)
    own = [name for name in listed if name not in PHASE_COLOURS]
    colours = {name: _OWN_COLOURS[place % len(_OWN_COLOURS)] for place, name in enumerate(own)}
    return {name: PHASE_COLOURS.get(name) or colours[name] for name in listed}


def fill_of(category: str) -> Fill:
    """Returns the look of a category; one this version does not know (a newer trace's) looks like an unknown one."""
    unknown = FILLS["unknown"]
    return FILLS.get(category, Fill(category, unknown.colour, unknown.pattern))
