"""Takes screenshots of every view, in both themes and three widths, to be looked at: `make screenshots`.

`python -m lab.pictures.screenshots [--quick] [NAME...]` takes those of some views; with `--quick`, each view in one
theme and width, which change from view to view.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from lab.pictures.catalogue import BIG, FITS, GPT, RANKS, THEMES
from lab.pictures.make import BUILD, COUNTS, ROOT, record_all, served, wait_quiet
from memprof_dashboard.pages import PAGES
from tests.browsing import find_browser, playwright

#: Where they are written.
FOLDER = ROOT / "build" / "screenshots"
#: A desktop, a small laptop, a phone.
SIZES = ((1440, 900), (1024, 768), (390, 844))
#: Frames of the page without a question, after which it is taken to be complete.
_FRAMES = 10
#: Shows another view without loading the page again.
_GO = """search => {
  document.activeElement?.blur();
  scrollTo(0, 0);
  dash_clientside.set_props("url", {search: `?${search}`});
}"""


@dataclass(frozen=True)
class Screenshot:
    """One view.

    Attributes:
        name: Its files' name, without theme, width and ending.
        recordings: What the dashboard is opened on.
        search: The view, as in the address.
        clicks: Selectors that are clicked before.
        is_window: The window alone, not the whole page; of a phone always the page, whose window ends in the timeline.
    """

    name: str
    recordings: tuple[str, ...]
    search: str = ""
    clicks: tuple[str, ...] = ()
    is_window: bool = False


_TWO = (BIG, FITS)
_PLAN = "plan=checkpoint%3Dlayers.*"
SCREENSHOTS = (
    Screenshot("first", (BIG,), is_window=True),
    *(
        Screenshot(tab, (BIG,), f"tab={tab}")
        for tab in PAGES
        if tab not in ("diff", "allocations", "ranks", "leaks", "host")
    ),
    Screenshot("diff", _TWO, "tab=diff&other=1"),
    Screenshot("allocations", _TWO, "tab=allocations&other=1"),
    Screenshot("ranks", (RANKS,), "tab=ranks"),
    Screenshot("leaks", ("leak.memprof",), "tab=leaks"),
    Screenshot("host", ("leak.memprof",), "tab=host"),
    Screenshot("line", (GPT,), "by=line&budget=60%25", is_window=True),
    Screenshot("stack", (GPT,), "by=stack", is_window=True),
    Screenshot("flame", (GPT,), "side=flame&by=stack", is_window=True),
    Screenshot("inverted", (GPT,), "side=flame&by=stack&inverted=1&find=mlp", is_window=True),
    Screenshot("treemap", (BIG,), "side=treemap", is_window=True),
    Screenshot("time", (GPT,), "axis=time", is_window=True),
    Screenshot("find", (GPT,), "find=mlp&side=treemap", is_window=True),
    Screenshot("tensor", (GPT,), clicks=("#live-table td button",), is_window=True),
    Screenshot("below", _TWO, "other=1", is_window=True),
    Screenshot("over", _TWO, f"other=1&lay=over&{_PLAN}", is_window=True),
    Screenshot("plan", (BIG,), f"tab=whatif&{_PLAN}&budget=20GiB"),
    Screenshot("plans", (GPT,), "tab=whatif&budget=60%25", clicks=("#whatif-search",)),
    Screenshot("keys", (GPT,), clicks=("#help-button",), is_window=True),
)


def _shoot(page: Any, one: Screenshot, path: Path) -> None:
    page.evaluate(_GO, one.search)
    wait_quiet(page, _FRAMES)
    for selector in one.clicks:
        page.locator(selector).first.click()
        wait_quiet(page, _FRAMES)
        if selector == "#whatif-search":
            page.wait_for_selector("#whatif-result .verdict")
            wait_quiet(page, _FRAMES)
    page.mouse.move(0, 0)
    is_phone = page.viewport_size["width"] == SIZES[-1][0]
    page.screenshot(path=str(path), full_page=is_phone or not one.is_window)
    page.keyboard.press("Escape")
    width, window = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    if width > window:
        raise RuntimeError(f"{path.name}: the page is {width - window} pixels wider than the window")


def main(names: list[str], *, is_quick: bool) -> int:
    """Takes all screenshots, or those of some names; each in one theme and width where it has to be quick."""
    chromium = find_browser()
    if chromium is None:
        print("make screenshots needs a Chromium: apt install chromium", file=sys.stderr)
        return 2
    BUILD.mkdir(parents=True, exist_ok=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    os.chdir(BUILD)  # pages show the path of a recording as it was given
    wanted = [one for one in SCREENSHOTS if not names or one.name in names]
    record_all({name for one in wanted for name in one.recordings})
    looks = list(product(THEMES, SIZES))
    looks_of = {one: looks[number % len(looks) :][:1] if is_quick else looks for number, one in enumerate(wanted)}
    count = 0
    with playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for recordings in dict.fromkeys(one.recordings for one in wanted):
            with served([Path(name) for name in recordings]) as address:
                for theme, (width, height) in looks:
                    views = [
                        one
                        for one in wanted
                        if one.recordings == recordings and (theme, (width, height)) in looks_of[one]
                    ]
                    if not views:
                        continue
                    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
                    context.set_default_timeout(120_000)
                    context.add_init_script(COUNTS)
                    page = context.new_page()
                    page.goto(address)
                    page.wait_for_selector("#timeline .main-svg", state="attached")
                    wait_quiet(page, _FRAMES)
                    for one in views:
                        _shoot(page, one, FOLDER / f"{one.name}-{theme}-{width}.png")
                    count += len(views)
                    context.close()
        browser.close()
    print(f"{count} screenshots in {FOLDER.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(main([name for name in given if name != "--quick"], is_quick="--quick" in given))
