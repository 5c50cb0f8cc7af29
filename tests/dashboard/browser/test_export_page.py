"""A report as one HTML file in a real browser: it draws without network access, in light, dark and print."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from memprof.analysis.report.report import build_report
from memprof.trace.store import Trace
from memprof.units import parse_bytes
from memprof_dashboard.export_page.export import export_html
from memprof_dashboard.palette import THEMES
from tests.building import Module, Op, Storage, make_trace
from tests.dashboard.browser.conftest import TIMEOUT_MS

SAMPLES = Path(__file__).parents[3] / "sample_traces"
_HIGHEST = """() => {
  const drawn = document.getElementById("timeline");
  const total = drawn.data.find((line) => line.name === "total");
  const top = Math.max(...drawn.calcdata[drawn.data.indexOf(total)].map((point) => point.y));
  return [top, drawn.layout.yaxis.title.text];
}"""
_INK = "document.querySelector('#timeline').layout.font.color"
_TEXT_FILLS = (
    """() => Array.from(document.querySelectorAll('#timeline .ytick text'), (e) => getComputedStyle(e).fill)"""
)


@pytest.fixture
def read(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens pages as files; a request of anything else, or any line in the console, fails the test."""
    contexts, heard = [], []

    def open_page(trace: Trace, **options: Any) -> Any:
        path = tmp_path / "report.html"
        path.write_text(export_html(trace), encoding="utf-8")
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        contexts.append(context)
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        page.on("request", lambda request: request.url != path.as_uri() and heard.append(f"asked {request.url[:200]}"))
        page.on("console", lambda line: heard.append(f"console: {line.text[:400]}"))
        page.on("pageerror", lambda error: heard.append(f"exception: {str(error)[:400]}"))
        page.on("dialog", lambda dialog: (heard.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-drawn]")
        page.wait_for_selector("#treemap .main-svg", state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert heard == []


@pytest.fixture
def gpt() -> Trace:
    """The sample GPT."""
    return Trace.open(SAMPLES / "gpt" / "run.memprof")


def _wait_ink(page: Any, ink: str) -> None:
    """Waits until the figures have a colour; the page's policy forbids the browser to wait for it by itself."""
    for _ in range(TIMEOUT_MS // 50):
        if page.evaluate(_INK) == ink:
            return
        page.wait_for_timeout(50)
    assert page.evaluate(_INK) == ink


@pytest.mark.parametrize("sample", ["gpt", pytest.param("resnet", marks=pytest.mark.slow)])
def test_the_drawn_peak_is_the_true_peak(read: Callable[..., Any], sample: str) -> None:
    """What the browser has drawn reaches the step's peak to the byte, and nothing was fetched or complained of."""
    trace = Trace.open(SAMPLES / sample / "run.memprof")
    top, unit = read(trace).evaluate(_HIGHEST)
    assert top * parse_bytes(f"1 {unit}") == build_report(trace).at_peak.moment.allocated_bytes


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_figures_follow_the_system(read: Callable[..., Any], gpt: Trace, theme: str) -> None:
    """Page and figures are in the colours of the system, and change with it."""
    page = read(gpt, color_scheme=theme)
    assert page.evaluate(_INK) == THEMES[theme].ink
    other = "dark" if theme == "light" else "light"
    page.emulate_media(color_scheme=other)
    _wait_ink(page, THEMES[other].ink)
    red, green, blue = (int(THEMES[other].ink[place : place + 2], 16) for place in (1, 3, 5))
    ink = f"rgb({red}, {green}, {blue})"
    assert set(page.evaluate(_TEXT_FILLS)) == {ink}
    assert page.evaluate("getComputedStyle(document.body).color") == ink


def test_on_paper_it_is_light_and_fits(read: Callable[..., Any], gpt: Trace, tmp_path: Path) -> None:
    """Printed from a dark screen, the page is dark on white and its figures fit the sheet; then it is as before."""
    page = read(gpt, color_scheme="dark")
    page.evaluate(
        f"""() => {{
          window.printed = [];
          addEventListener("beforeprint", () => printed.push({_INK}, document.querySelector(
            "#timeline .main-svg").getBoundingClientRect().width));
        }}"""
    )
    page.pdf(path=tmp_path / "report.pdf", format="A4")
    ink, width = page.evaluate("window.printed")
    assert ink == THEMES["light"].ink
    assert width <= 700  # A4 between its margins, in CSS pixels
    _wait_ink(page, THEMES["dark"].ink)
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.parametrize("width", [375, pytest.param(1200, marks=pytest.mark.slow)])
def test_nothing_sticks_out(read: Callable[..., Any], gpt: Trace, width: int) -> None:
    """The page is never wider than the screen, also on a telephone; wide tables scroll by themselves."""
    page = read(gpt, viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_hostile_names_do_nothing(read: Callable[..., Any]) -> None:
    """Names that are markup are read as they are, and no script of theirs runs."""
    name = "</script><img src=x onerror=alert(1)><svg onload=alert(2)>"
    op = Op(name, makes=["a"], module=name, stack=f"/job/{name}.py:1:{name}")
    page = read(make_trace([[op]], [Storage("a", 4096, name, name, name, shape=name)], [Module(name, name)]))
    assert page.locator("img").count() == 0
    assert name in page.inner_text("body")
    page.locator("#treemap .slice").last.hover()
    page.wait_for_selector("#treemap .hoverlayer text")
    assert "onerror=alert" in page.locator("#treemap .hoverlayer").text_content()


def test_without_scripts_the_tables_are_there(browser: Any, gpt: Trace, tmp_path: Path) -> None:
    """Without scripts, as in some artifact viewers, the tables are readable and a message replaces the figures."""
    path = tmp_path / "report.html"
    path.write_text(export_html(gpt), encoding="utf-8")
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    text = page.inner_text("body")
    context.close()
    assert "88.92 MiB" in text
    assert "The figure needs JavaScript" in text
