"""Starts Playwright, which drives the browser of the tests, also where the temporary folder cannot be written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from playwright.sync_api import sync_playwright


@contextmanager
def playwright() -> Iterator[Any]:
    """Starts Playwright with the temporary folder that Python has found to be writable, and stops it at the end.

    Playwright and Chromium write to TMPDIR as it is, and fail where it is full or read-only.
    """
    with mock.patch.dict(os.environ, TMPDIR=tempfile.gettempdir()):
        started = sync_playwright().start()
    try:
        yield started
    finally:
        started.stop()
