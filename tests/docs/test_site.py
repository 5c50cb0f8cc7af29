"""The built site: it makes no requests to other hosts, and can be read and searched from files."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from docs.building.commands import ROOT
from docs.building.workshop import run
from memprof.cli.main import VERBS
from memprof.planners.base import planner_types

#: What a page may not load; links that a reader clicks are no such thing.
_LOADED = re.compile(r"""(?:<(?:script|img|iframe|source)[^>]*\bsrc|<link[^>]*\bhref)=["']?((?:https?:)?//[^"'\s>]+)""")
_IN_STYLES = re.compile(r"""url\(["']?((?:https?:)?//[^"')]+)|@import""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly; commands are not run for it. `.ci/run` gives that of `make docs`."""
    if built := os.environ.get("MEMPROF_SITE"):
        return Path(built)
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = ["python", "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = run(command, ROOT, {"MEMPROF_DOCS_RUN": "0", "NO_MKDOCS_2_WARNING": "1", "HOME": str(folder.parent)})
    assert done.status == 0, done.output + done.errors
    return folder


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    """Scripts, styles, fonts and images are all in the site."""
    for page in site.rglob("*.html"):
        assert _LOADED.findall(page.read_text(encoding="utf-8")) == [], page
    for style in site.rglob("*.css"):
        assert _IN_STYLES.findall(style.read_text(encoding="utf-8")) == [], style


def test_what_is_generated_is_there(site: Path) -> None:
    """Each verb has a page, planners their table, bars in code no backslash; what builds the site is not in it."""
    assert {page.stem for page in (site / "verbs").glob("*.html")} == {"index", *VERBS}
    planners = (site / "planners.html").read_text(encoding="utf-8")
    assert all(f"<code>{kind.name}</code>" in planners for kind in planner_types())
    assert "<code>--by category|module|op|source|stack|phase|storage</code>" in (site / "report.html").read_text()
    assert not list(site.rglob("*.py"))


def test_llms_txt_names_every_page(site: Path) -> None:
    """Each page of the navigation is there with a sentence on it, and every link leads to a page of the site."""
    text = (site / "llms.txt").read_text(encoding="utf-8")
    linked = re.findall(r"^- \[[^\]]+\]\(([\w/-]+\.html)\): \S.+$", text, re.MULTILINE)
    assert len(linked) == text.count("\n- ")
    assert all((site / name).is_file() for name in linked)
    assert {"history.html", "agents.html", "verbs/demo.html", "changelog.html"} <= set(linked)


def test_it_is_searched_from_files(site: Path) -> None:
    """A page opened as a file, in a browser, finds a word in other pages and leads there."""
    pytest.importorskip("playwright")
    from tests.browsing import find_browser

    chromium = find_browser()
    if chromium is None:
        assert os.environ.get("MEMPROF_BROWSER_TESTS") != "require", "there is no browser"
        pytest.skip("no Chromium is installed")
    with ThreadPoolExecutor(1) as other:  # other tests may have a browser open in this thread
        asked = other.submit(_search, chromium, site).result()
    assert [url for url in asked if not url.startswith(("file:", "data:", "about:", "blob:"))] == []


def _search(chromium: str, site: Path) -> list[str]:
    """Searches for a word and follows the first page found; returns what was asked for on the way."""
    from tests.browsing import playwright

    with playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "verbs" / "record.html").as_uri())
        page.locator("input.md-search__input").click()
        page.locator(".md-search-result__meta", has_text="Type to start searching").wait_for()  # the index is read
        page.locator("input.md-search__input").press_sequentially("fragmentation")
        page.locator("a.md-search-result__link[href*='out-of-memory.html']").first.click()
        page.wait_for_url("**/out-of-memory.html?h=fragmentation*")
        browser.close()
        return asked
