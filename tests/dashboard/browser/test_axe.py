"""Accessibility: axe-core finds nothing serious on any page, in either theme."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memprof_dashboard.pages import PAGES
from tests.dashboard.browser.conftest import Served, Shown

ROOT = Path(__file__).parents[3]
#: Rules that belong to a standard, and those that its authors call good practice.
_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
_RUN = """async ([tags, part]) => {
  const found = await axe.run(part || document, {resultTypes: ["violations"], runOnly: {type: "tag", values: tags}});
  return found.violations.map((one) => [one.impact, one.id, one.nodes.map((node) => node.html.slice(0, 300))]);
}"""
#: What else is on a page: a tensor in full, a flame graph, the list of keys, a plan drawn over the timeline.
_PARTS = {
    "tensor": ("storage=1", ""),
    "flame": ("side=flame&by=stack", ""),
    "keys": ("", "#help-button"),
    "plan": ("plan=checkpoint%3Dlayers.*", ""),
}


@pytest.fixture(scope="package")
def axe() -> str:
    """Installs axe-core with npm, in the version of package-lock.json, and returns its source."""
    folder = ROOT / "build" / "axe"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)  # other processes of the same test run install it, too
        return _installed(folder).read_text(encoding="utf-8")


def _installed(folder: Path) -> Path:
    source = folder / "node_modules" / "axe-core" / "axe.min.js"
    lock = Path(__file__).with_name("package-lock.json")
    if source.is_file() and (folder / lock.name).read_bytes() == lock.read_bytes():
        return source
    npm = shutil.which("npm")
    if npm is None:
        if os.environ.get("MEMPROF_BROWSER_TESTS") == "require":
            pytest.fail("npm is not installed (apt install npm)")
        pytest.skip("npm is not installed (apt install npm)")
    for name in ("package.json", lock.name):
        shutil.copy(lock.with_name(name), folder / name)
    subprocess.run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=folder, check=True)
    return source


def _violations(shown: Shown, axe: str, part: str = "") -> list[Any]:
    shown.wait_idle()
    if not shown.page.evaluate("'axe' in window"):
        shown.page.evaluate(axe)
    found: list[Any] = shown.page.evaluate(_RUN, [_TAGS, part])
    return found


def _assert_accessible(shown: Shown, axe: str) -> None:
    serious = [one for one in _violations(shown, axe) if one[0] in ("serious", "critical")]
    assert not serious, json.dumps(serious, indent=1)


def test_the_first_screen_is_accessible(look: Callable[..., Shown], two: Served, axe: str) -> None:
    """Names, roles, contrast and structure of the page that opens first."""
    _assert_accessible(look(two, "tab=whatif&other=1&budget=50%25", color_scheme="light"), axe)


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("tab", list(PAGES))
def test_every_page_is_accessible(look: Callable[..., Shown], two: Served, axe: str, tab: str, theme: str) -> None:
    """The same on every page below, in both themes."""
    _assert_accessible(look(two, f"tab={tab}&other=1&budget=50%25", color_scheme=theme), axe)


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("part", list(_PARTS))
def test_every_part_is_accessible(look: Callable[..., Shown], gpt: Served, axe: str, part: str, theme: str) -> None:
    """The same of what a click opens."""
    search, click = _PARTS[part]
    shown = look(gpt, search, color_scheme=theme)
    if click:
        shown.page.click(click)
    _assert_accessible(shown, axe)
    if click:
        shown.page.keyboard.press("Escape")
