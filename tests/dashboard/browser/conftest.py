"""The dashboard in a real browser: every error in the browser's console fails the test."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

pytest.importorskip("dash")
pytest.importorskip("playwright")

from playwright.sync_api import TimeoutError as PlaywrightTimeout
from werkzeug.serving import make_server

from memprof_dashboard.app import create_app
from memprof_dashboard.sources import Workspace, open_sources
from memprof_dashboard.state import View
from tests.browsing import find_browser, playwright

SAMPLES = Path(__file__).parents[3] / "sample_traces"
#: Without a network service of its own that talks to anybody.
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
#: The timeline as the browser holds it: numbers of each line, the axis, the shapes.
_FIGURE = """id => {
  const drawn = document.querySelector(`#${id} .js-plotly-plot`);
  const numbers = (values) => Array.from(values._inputArray ?? values);
  // Without the inset around a narrow peak.
  const lines = drawn.data.filter((line) => line.type === "scatter" && line.xaxis !== "x3");
  return {
    lines: Object.fromEntries(lines.map((line) => [line.name, numbers(line.y)])),
    x: numbers(lines[0].x),
    range: drawn.layout.xaxis.range,
    top: drawn.layout.yaxis.range[1],
    unit: drawn.layout.yaxis.title.text,
    shapes: drawn.layout.shapes,
    ink: drawn.layout.font.color,
    notes: (drawn.layout.annotations ?? []).map((note) => note.text),
  };
}"""
_IS_DRAWN = """([id, first, end]) => {
  const drawn = document.querySelector(`#${id} .js-plotly-plot`);
  const range = drawn?.layout?.xaxis?.range;
  const x = drawn?.data?.find((line) => line.type === "scatter")?.x;
  const held = x && Array.from(x._inputArray ?? x);  // plotly itself moves the range before the data come
  return !!drawn?.querySelector(".main-svg .scatterlayer .trace")
    && range?.[0] === first && range?.[1] === end && held?.[0] === first && held?.at(-1) === end;
}"""
#: Where the line of the cursor stands.
_CURSOR = "document.querySelector('#timeline .js-plotly-plot')?.layout?.shapes?.[0]?.x0"
#: Counts the answers that a page waits for.
_COUNTS = """(() => {
  const ask = window.fetch;
  const asked = (window.testAsked = {waiting: 0, quiet: 0});
  const count = (by) => { asked.waiting += by; asked.quiet = 0; };
  window.fetch = (...all) => { count(1); return ask(...all).finally(() => count(-1)); };
})()"""
#: Nothing was asked for ten frames of the page: what led to a question, or to another one, has led to it by then.
#: And no chart is larger than its place: plotly draws one anew a tenth of a second after its place shrank.
_IS_QUIET = """() => testAsked.waiting === 0 && ![...document.querySelectorAll(".js-plotly-plot")].some((one) => (
  one.offsetWidth && (one.scrollWidth > one.clientWidth + 1 || one.scrollHeight > one.clientHeight + 1))
) && ++testAsked.quiet > 10"""
#: A view is chosen as the browser's back button chooses it. Where the keys go, and how far one scrolled, are reset.
_GO = """search => {
  document.activeElement?.blur();
  scrollTo(0, 0);
  dash_clientside.set_props("url", {search: search && `?${search}`});
}"""
_WINDOW = {"width": 1300, "height": 1000}
#: What a test waits for comes, however busy the machine is: only what never comes is an error.
TIMEOUT_MS = 60_000


#: The shared pages, by the dashboard that they show.
_kept: dict[str, Shown] = {}


@dataclass
class Served:
    """A dashboard that is running."""

    origin: str
    token: str
    workspace: Workspace

    def address(self, search: str = "") -> str:
        """Returns what memprof prints; ``search`` is the view, such as ``tab=diff&at=3``."""
        return f"{self.origin}/?token={self.token}{search and '&'}{search}"


#: Dash complains where the page changes while the answer for a form on it is on its way; it has no effect.
_ALWAYS_EXPECTED = ("nonexistent object was used in an `Output`[^`]*`draft-ticks`",)


@dataclass
class Shown:
    """A page of the dashboard in the browser, and what a test asks it."""

    page: Any
    served: Served
    #: What the browser complained of.
    complaints: list[str] = field(default_factory=list)
    #: Patterns of complaints that a test provokes.
    expected: list[str] = field(default_factory=lambda: list(_ALWAYS_EXPECTED))

    def figure(self, name: str = "timeline") -> dict[str, Any]:
        """Returns a timeline's data and layout as the browser holds them."""
        figure: dict[str, Any] = self.page.evaluate(_FIGURE, name)
        return figure

    def wait_drawn(self, first: int, end: int, name: str = "timeline") -> None:
        """Waits until a timeline shows a range."""
        self.page.wait_for_function(_IS_DRAWN, arg=[name, first, end])

    def wait_view(self, **fields: Any) -> None:
        """Waits until the address has the fields of a view.

        Raises:
            AssertionError: It never has; the message contains what the page shows instead.
        """
        try:
            self.page.wait_for_function(
                "wanted => wanted.every(([name, value]) => new URLSearchParams(location.search).get(name) === value)",
                arg=[[name, str(value)] for name, value in fields.items()],
            )
        except PlaywrightTimeout as error:
            raise AssertionError(f"no view with {fields}; the page has {self._state()}") from error

    def wait_text(self, selector: str, text: str) -> None:
        """Waits until an element holds a text."""
        self.page.wait_for_function(
            "([selector, text]) => document.querySelector(selector)?.textContent.includes(text)", arg=[selector, text]
        )

    def wait_cursor(self, at: int) -> None:
        """Waits until the cursor's line and its text are at an operator.

        Raises:
            AssertionError: They never are; the message contains what the page shows instead.
        """
        try:
            self.page.wait_for_function(f"x => ({_CURSOR}) === x", arg=at + 0.5)
        except PlaywrightTimeout as error:
            raise AssertionError(f"no cursor at {at}; the page has {self._state()}") from error
        self.wait_text("#readout", f"during operator {at:,}:")

    def go(self, **fields: Any) -> None:
        """Changes the view as a page does that asks for a jump."""
        self.page.evaluate("fields => window.dash_clientside.set_props('go', {data: fields})", fields)

    def open_tab(self, name: str, title: str) -> None:
        """Clicks a tab, and waits until its page has filled."""
        self.wait_idle()  # parts that still arrive above the tabs push them from under the mouse
        self.page.locator(".tabs .tab", has_text=re.compile(f"^{re.escape(title)}$")).click()
        if name != "whatif":
            self.wait_view(tab=name)
        self.wait_idle()
        self.page.wait_for_function("() => document.querySelector('#panel')?.textContent.trim().length > 0")

    def _state(self) -> Any:
        """Returns what says why a test waits in vain: address, tab, cursor, open questions and sentences."""
        return self.page.evaluate(
            """() => [location.search, document.querySelector(".tab--selected")?.textContent, CURSOR, testAsked,
              ...["readout", "note"].map((id) => document.getElementById(id)?.textContent)]""".replace(
                "CURSOR", _CURSOR
            )
        )

    def wait_idle(self) -> None:
        """Waits until no callback is under way, and every chart has the size of its place."""
        self.page.evaluate("testAsked.quiet = 0")
        self.page.wait_for_function(_IS_QUIET)

    def move(self, search: str = "") -> None:
        """Shows another view without loading the page again."""
        self.wait_idle()  # what the view before still asks for is not to answer after this one
        self.page.mouse.move(0, 0)
        self.page.evaluate(_GO, search)
        self.wait_idle()

    def wait_any_drawn(self) -> None:
        """Waits until the timeline shows something."""
        self.page.wait_for_selector("#timeline .main-svg .scatterlayer .trace", state="attached")

    def unexpected(self) -> list[str]:
        """Returns what the browser complained of that no test provoked."""
        if not self.page.is_closed():
            self.page.evaluate("0")  # receives what is still on its way
        return [one for one in self.complaints if not any(re.search(pattern, one) for pattern in self.expected)]

    @property
    def view(self) -> View:
        """What the address says is looked at."""
        return View.from_search(f"?{urlsplit(self.page.url).query}")

    def drag(self, low: float, high: float, name: str = "timeline") -> None:
        """Drags over a part of a timeline, from one fraction of its width to another."""
        box = self.page.locator(f"#{name} .nsewdrag.drag").first.bounding_box()
        middle = box["y"] + box["height"] / 2
        self.page.mouse.move(box["x"] + low * box["width"], middle)
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + (low + high) / 2 * box["width"], middle, steps=3)
        self.page.mouse.move(box["x"] + high * box["width"], middle, steps=3)
        self.page.mouse.up()


def _found_chromium() -> str:
    """Returns where a browser is; skips where there is none, unless the environment says that there must be."""
    found = find_browser()
    if found is not None:
        return found
    reason = "no Chromium is installed (apt install chromium)"
    if os.environ.get("MEMPROF_BROWSER_TESTS") == "require":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """One Chromium for all of these tests; it ends with them, since its event loop is in the way of others."""
    path = _found_chromium()
    with playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=list(_ARGUMENTS))
        yield started
        started.close()


@pytest.fixture(scope="package")
def serve() -> Iterator[Callable[..., Served]]:
    """Serves recordings; the same ones once."""
    running: dict[tuple[Path, ...], Served] = {}
    servers = []

    def start(*paths: Path) -> Served:
        if paths not in running:
            sources = open_sources(list(paths))
            token = "a-token-of-the-tests"
            app = create_app(sources, token=token)
            logging.getLogger("werkzeug").setLevel(logging.ERROR)
            server = make_server("127.0.0.1", 0, app.server, threaded=True)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            servers.append(server)
            running[paths] = Served(f"http://127.0.0.1:{server.port}", token, Workspace(sources))
        return running[paths]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def show(browser: Any) -> Iterator[Callable[..., Shown]]:
    """Opens pages, each in its own browser context; an unexpected console error fails the test."""
    opened: list[Shown] = []

    def open_page(served: Served, search: str = "", *, is_drawn: bool = True, **options: Any) -> Shown:
        opened.append(_opened(browser, served, options))
        opened[-1].page.goto(served.address(search))
        if is_drawn:
            opened[-1].wait_any_drawn()
        return opened[-1]

    yield open_page
    complaints = [complaint for shown in opened for complaint in shown.unexpected()]
    for shown in opened:
        shown.page.context.close()
    assert not complaints, json.dumps(complaints[:10], indent=1)


@pytest.fixture
def kept(browser: Any) -> dict[str, Shown]:
    """Pages that tests share: loading one takes longer than most tests."""
    return _kept


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Closes the shared pages before other tests: they go on asking their dashboards, which run in this process."""
    if nextitem is None:  # the browser has been closed by now
        _kept.clear()
    elif nextitem.path.parent != item.path.parent:
        while _kept:
            _kept.popitem()[1].page.context.close()


@pytest.fixture
def look(browser: Any, kept: dict[str, Shown]) -> Iterator[Callable[..., Shown]]:
    """Goes to a view on a page that is open already, as ``show`` opens one; its complaints fail the test as well.

    One page of each dashboard is open. Another size of its window, or theme of the system, is set on it.
    """
    looked: dict[str, Shown] = {}

    def look_at(
        served: Served, search: str = "", *, viewport: Any = _WINDOW, color_scheme: str = "light", is_drawn: bool = True
    ) -> Shown:
        key = served.origin
        if key in kept:
            kept[key].page.set_viewport_size(viewport)
            kept[key].page.emulate_media(color_scheme=color_scheme)
            kept[key].move(search)
        else:
            kept[key] = _opened(browser, served, {"viewport": viewport, "color_scheme": color_scheme})
            kept[key].page.goto(served.address(search))
            if is_drawn:
                kept[key].wait_any_drawn()
            kept[key].wait_idle()
        looked[key] = kept[key]
        return kept[key]

    yield look_at
    complaints = [complaint for shown in looked.values() for complaint in shown.unexpected()]
    for key in looked if complaints else ():
        kept.pop(key).page.context.close()
    assert not complaints, json.dumps(complaints[:10], indent=1)


def _opened(browser: Any, served: Served, options: dict[str, Any]) -> Shown:
    """Returns a page that was listened to from its beginning, still empty."""
    context = browser.new_context(**{"viewport": _WINDOW, **options})
    context.set_default_timeout(TIMEOUT_MS)
    context.add_init_script(_COUNTS)
    shown = Shown(context.new_page(), served)
    _listen(shown)
    return shown


def _listen(shown: Shown) -> None:
    """Writes down what a page complains of, and whom it asks."""

    def hear_request(request: Any) -> None:
        if not request.url.startswith((shown.served.origin + "/", "data:", "blob:")):
            shown.complaints.append(f"asked another site: {request.url[:200]}")

    def hear_response(answer: Any) -> None:
        if answer.status >= 400:
            shown.complaints.append(f"{answer.status} {answer.url}")

    page = shown.page
    page.on("console", lambda line: line.type == "error" and shown.complaints.append(f"console: {line.text[:500]}"))
    page.on("pageerror", lambda error: shown.complaints.append(f"exception: {str(error)[:500]}"))
    page.on(
        "response", lambda answer: answer.status >= 400 and shown.complaints.append(f"{answer.status} {answer.url}")
    )
    page.on("request", hear_request)
    page.on("websocket", lambda socket: shown.complaints.append(f"opened a socket: {socket.url[:200]}"))
    page.on("dialog", lambda dialog: (shown.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))


@pytest.fixture(scope="package")
def gpt(serve: Callable[..., Served]) -> Served:
    """The sample GPT."""
    return serve(SAMPLES / "gpt" / "run.memprof")


@pytest.fixture(scope="package")
def two(serve: Callable[..., Served]) -> Served:
    """The sample GPT, and the sample ResNet to compare it with."""
    return serve(SAMPLES / "gpt" / "run.memprof", SAMPLES / "resnet" / "run.memprof")


def unit_bytes(unit: str) -> int:
    """Returns the bytes of an axis' unit."""
    return {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]


def assert_true_peak(shown: Shown, first: int, end: int) -> None:
    """Asserts that a drawn range shows its true peak, and that the areas sum to it."""
    history = shown.served.workspace.rank(0, -1).history
    truth = int(history.total[first:end].max())
    figure = shown.figure()
    size = unit_bytes(figure["unit"])
    lines = figure["lines"]
    assert max(lines["total"]) * size == pytest.approx(truth, rel=1e-12)
    areas = np.sum([values for name, values in lines.items() if name not in ("total", "lowest", "found")], axis=0)
    np.testing.assert_allclose(areas, lines["total"], rtol=1e-6)
