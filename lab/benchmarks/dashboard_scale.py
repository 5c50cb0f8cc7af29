"""How fast the dashboard is, and how much memory it takes, at ten thousand to ten million events, in a real browser."""

from __future__ import annotations

import re
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from lab.benchmarks.recording import MEMPROF, SAMPLES, environment
from lab.benchmarks.section import Bar, Section
from tests.browsing import find_browser, playwright
from tests.synthetic import write_synthetic

#: Events, and layers of the model; each event is a birth or a death.
_SIZES = ((10_000, 32), (1_000_000, 32), (10_000_000, 320))
_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
_HAS_TIMELINE = "() => !!document.querySelector('#timeline .main-svg .scatterlayer .trace')"
#: Presses a key, and tells after how many milliseconds what it changes was on the screen; fails after a minute.
_PRESS = """([key, selector, what]) => new Promise((resolve, reject) => {
  const element = () => document.querySelector(selector);
  const state = {
    columns: () => element()?.data?.find((line) => line.name === "total")?.y,
    served: () => (window.served = element()?.data?.[0]?.x?.bdata ?? window.served), // not what was drawn here
    text: () => element()?.textContent,
  }[what];
  const before = state(), start = performance.now();
  document.body.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
  const look = () => state() !== before ? requestAnimationFrame(() => resolve(performance.now() - start))
    : performance.now() - start > 60000
    ? reject(new Error(`${key} changed nothing in ${selector}`))
    : setTimeout(look, 2);
  look();
})"""


def measure(folder: Path, *, quick: bool) -> Section:
    """Opens recordings of four sizes, zooms and moves the cursor."""
    traces = [("sample GPT", SAMPLES / "gpt" / "run.memprof")]
    for events, layers in _SIZES[: 2 if quick else 3]:
        path = folder / f"{events}.memprof"
        write_synthetic(path, events, layers=layers)
        traces.append((f"{events:,} events", path))
    figures = {name: _figures(path, 3 if quick else 9) for name, path in traces}
    largest = figures[traces[-1][0]]
    columns = tuple(largest)
    return Section(
        "The dashboard",
        "`memprof dashboard` in headless Chromium on the same machine. first: from the start of the process to the "
        "first timeline. at once: from the key to the columns of the new range; zoom: to the server's names "
        "and single operators, behind a pause of 250 ms; cursor: to the screen; medians. table: the answer with what "
        "is alive at the cursor. server: resident memory. sent, answered: the largest request and answer.",
        ("recording", *columns),
        [(name, *(_cell(row[column]) for column in columns)) for name, row in figures.items()],
        Bar(
            f"with {traces[-1][0]}, first timeline within 3 s, zoom 350 ms, table 100 ms, 700 MB",
            f"{largest['first, s']:.2f} s, {largest['zoom, ms']:.0f} ms, {largest['table, ms']:.0f} ms, "
            f"{largest['server, MB']:.0f} MB",
            passed=largest["first, s"] <= 3
            and largest["zoom, ms"] <= 350
            and largest["table, ms"] <= 100
            and largest["server, MB"] <= 700,
        ),
    )


def _cell(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def _figures(trace: Path, repetitions: int) -> dict[str, float]:
    """Returns what was measured on one recording, in the units of the columns' names."""
    sizes: list[tuple[int, int]] = []
    tables: list[float] = []

    def hear(request: Any) -> None:
        if request.method == "POST":
            answer = request.response()
            sizes.append((len(request.post_data or ""), len(answer.body())))
            if "live-table.children" in (request.post_data or ""):
                tables.append(request.timing["responseEnd"] - request.timing["requestStart"])

    with playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_browser(), args=_ARGUMENTS)
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        page.set_default_timeout(60_000)
        start = time.monotonic()
        with _server(trace) as (address, process):
            page.goto(address)
            page.wait_for_function(_HAS_TIMELINE)
            first = time.monotonic() - start
            page.wait_for_load_state("networkidle")
            page.on("requestfinished", hear)
            at_once, zooms, cursors = [], [], []
            for _ in range(repetitions):
                for key, what, taken in (("+", "columns", at_once), ("-", "served", zooms)):
                    taken.append(page.evaluate(_PRESS, [key, "#timeline .js-plotly-plot", what]))
                    page.wait_for_load_state("networkidle")
                cursors.append(page.evaluate(_PRESS, ["ArrowLeft", "#readout", "text"]))
                page.wait_for_load_state("networkidle")
            page.keyboard.press("Home")
            page.wait_for_timeout(1_000)
            page.wait_for_load_state("networkidle")
            memory = process.memory_info().rss / 1e6
        browser.close()
    return {
        "first, s": first,
        "at once, ms": statistics.median(at_once),
        "zoom, ms": statistics.median(zooms),
        "cursor, ms": statistics.median(cursors),
        "table, ms": statistics.median(tables),
        "server, MB": memory,
        "sent, kB": max(sent for sent, _ in sizes) / 1e3,
        "answered, kB": max(answered for _, answered in sizes) / 1e3,
    }


@contextmanager
def _server(trace: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Serves a recording by its command; yields the address and the process."""
    command = [*MEMPROF, "dashboard", str(trace), "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stderr is not None
        found = None
        while not found:
            line = process.stderr.readline()
            if not line:
                raise RuntimeError(f"{' '.join(command)} ended with {process.wait()}")
            found = re.search(r"http://\S+", line)
        try:
            yield found[0], psutil.Process(process.pid)
        finally:
            process.terminate()
