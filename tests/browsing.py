"""Finds the browser of the tests, starts Playwright, which drives it, and reads parts of a page without one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

#: Debian's Chromium without its window comes first: a page of the dashboard takes a fifth less processor time there.
_BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str | None:
    """Returns the path of a Chromium, or None where none is installed."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


@contextmanager
def playwright() -> Iterator[Any]:
    """Starts Playwright with the temporary folder that Python has found to be writable, and stops it at the end.

    Playwright and Chromium write to TMPDIR as it is, and fail where it is full or read-only.
    """
    from playwright.sync_api import sync_playwright

    with mock.patch.dict(os.environ, TMPDIR=tempfile.gettempdir()):
        started = sync_playwright().start()
    try:
        yield started
    finally:
        started.stop()


def text_of(component: Any) -> str:
    """Returns what is read of a component of a page, or of several."""
    if isinstance(component, list):
        return "".join(map(text_of, component))
    if isinstance(component, str):
        return component
    return text_of(getattr(component, "children", None) or "")


def as_plotly(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Has a function's figures made plotly's own objects, which refuse a field that there is not."""
    from plotly import graph_objects as go

    def drawn(*args: Any) -> go.Figure:
        figure = draw(*args)
        return go.Figure(data=figure.data, layout=figure.layout)

    return drawn
