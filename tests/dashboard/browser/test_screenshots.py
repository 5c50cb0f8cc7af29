"""Every page in both themes, drawn without complaint; `make screenshots` makes pictures to look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memprof_dashboard.pages import PAGES
from tests.dashboard.browser.conftest import Served, Shown
from tests.dashboard.browser.test_small_windows import LAPTOP, PHONE


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
@pytest.mark.parametrize("tab", list(PAGES))
def test_view_is_drawn(look: Callable[..., Shown], two: Served, tmp_path: Path, tab: str, theme: str) -> None:
    """The page holds something in the theme's own colours, and is no wider than the window, a laptop's or a phone's."""
    shown = look(two, f"tab={tab}&other=1&budget=50%25", color_scheme=theme)
    assert shown.view.tab == tab
    shown.page.wait_for_function("() => document.querySelector('#panel')?.textContent.trim().length > 40")
    path = tmp_path / "page.png"
    shown.page.screenshot(path=str(path), full_page=True)
    assert path.stat().st_size > 20_000
    color: Any = shown.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert color == {"light": "rgb(255, 255, 255)", "dark": "rgb(18, 22, 28)"}[theme]
    for window in (shown.page.viewport_size, LAPTOP["viewport"], PHONE["viewport"]):
        shown.page.set_viewport_size(window)
        shown.wait_idle()
        assert shown.page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0, window
