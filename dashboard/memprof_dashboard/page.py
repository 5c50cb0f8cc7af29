"""Protocol of a dashboard page, and error handling of its callbacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

from dash import Dash
from dash.exceptions import PreventUpdate
from plotly import graph_objects as go

from memprof.errors import MemprofError
from memprof_dashboard import parts
from memprof_dashboard.figures.shared import message
from memprof_dashboard.palette import THEMES, Theme
from memprof_dashboard.sources import Workspace
from memprof_dashboard.state import View

#: Options of a callback that answers after the first timeline, when its input comes.
LATER: Any = {"prevent_initial_call": True}
P = ParamSpec("P")
R = TypeVar("R")


class Page(Protocol):
    """A module of ``pages``."""

    #: Title of its tab.
    TITLE: str

    def layout(self, workspace: Workspace, view: View) -> Any:
        """Returns its components; callbacks fill those that depend on the window or the cursor."""
        ...

    def register(self, app: Dash, workspace: Workspace) -> None:
        """Registers its callbacks."""
        ...


def theme_of(name: Any) -> Theme:
    """Returns the theme for a name sent by the browser."""
    return THEMES["dark" if name == "dark" else "light"]


def view_of(store: Any) -> View:
    """Returns the view in a store of the browser; a callback ends without a change where the store is still empty."""
    if store is None:
        raise PreventUpdate
    return View.from_json(store)


def or_sentence(fill: Callable[P, R]) -> Callable[P, R | Any]:
    """Wraps a callback that returns components: on a read error it returns the error message."""

    @functools.wraps(fill)
    def filled(*args: P.args, **kwargs: P.kwargs) -> R | Any:
        try:
            return fill(*args, **kwargs)
        except MemprofError as error:
            return parts.error(str(error))

    return filled


def or_message(draw: Callable[..., go.Figure]) -> Callable[..., go.Figure]:
    """Wraps a callback that returns a figure (theme name last): on an error it draws the message."""

    @functools.wraps(draw)
    def drawn(*args: Any) -> go.Figure:
        try:
            return draw(*args)
        except MemprofError as error:
            return message(str(error), theme_of(args[-1]))

    return drawn
