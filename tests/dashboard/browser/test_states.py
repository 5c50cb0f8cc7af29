"""Recordings that are empty, cut short, damaged, hostile or growing; and a server that goes away."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memprof.errors import BadInputError
from memprof.trace.manifest import Capture, Manifest
from memprof.trace.store import write_trace
from memprof_dashboard.app import follows
from memprof_dashboard.pages import PAGES
from memprof_dashboard.serve import open_started
from memprof_dashboard.sources import Workspace, open_sources
from memprof_dashboard.state import View
from tests.building import Module, Op, Storage, Tables, make_tables
from tests.dashboard.browser.conftest import Served, Shown

Show = Callable[..., Shown]
Serve = Callable[..., Served]

#: The launch record of a job that runs as long as this process.
LAUNCH = json.dumps({"command": ["python", "train.py"], "parent_pid": os.getpid(), "started_us": time.time() * 1e6})
HOSTILE = [
    "<img src=x onerror=\"document.title='owned'\">",
    "<script>document.title='owned'</script>",
    "\"'`><svg onload=document.title='owned'>",
    "<a href=\"javascript:document.title='owned'\">click</a>",
    "%{y}<b>bold</b>&lt;i&gt;{{7*7}}${7*7}",
    "\u202eright to left\u202c",
    "two\nlines\tand a tab",
    "long " * 2_000,
]


#: Brings a graph of a page into view, and returns where its middle is.
_MIDDLE = """place => {
  const graph = document.querySelectorAll("#panel .js-plotly-plot")[place];
  graph?.scrollIntoView({block: "center"});
  const box = graph?.getBoundingClientRect();
  return box ? [box.x + box.width / 2, box.y + box.height / 2] : null;
}"""
#: What no part of the page is made of: an element of these is a name that was obeyed.
_FOREIGN = """() => [...document.querySelectorAll("body img, body a[href^='javascript'], [onerror], [onload]")]
  .filter((one) => !one.src?.startsWith("data:image/png"))
  .map((one) => one.outerHTML.slice(0, 200))"""


def write(path: Path, tables: Tables, **manifest: Any) -> Path:
    write_trace(path, [(Manifest(**{"target": "train.py", "pid": 7, **manifest}), tables)])
    return path


def hostile_tables() -> Tables:
    """Every name that a script chooses is an attack on a page: operators, modules, parameters, shapes, stacks."""
    ops, storages, modules = [], [], []
    for place, text in enumerate(HOSTILE):
        name = text.replace(".", "\u2024")  # a dot would part the module's name
        modules += [Module(name, type=text)]
        storages += [
            Storage(f"made{place}", 4096 * (place + 1), "activation", name=text, module=name, shape=text, dtype=text),
            Storage(f"held{place}", 8192 * (place + 1), "parameter", name=text, module=name, shape=text, dtype=text),
        ]
        stack = f"{text}:3:{text}\ntrain.py:9:main" if "\n" not in text else f"file\u2028.py:3:{text}"
        ops += [Op(text, module=name, makes=[f"made{place}"], reads=[f"held{place}"], stack=stack)]
    ops += [Op("aten.mm.default", "backward", reads=["made0"], frees=[f"made{n}" for n in range(len(HOSTILE))])]
    return make_tables([ops, ops], storages, modules)


def test_hostile_names_are_text(show: Show, serve: Serve, tmp_path: Path) -> None:
    """On every tab, names of HTML, script, quotes, lines and ten thousand letters are shown as they are, or cut."""
    shown = show(serve(write(tmp_path / "run.memprof", hostile_tables(), target="<b>train</b>.py")), "storage=1&at=11")
    first, count = len(HOSTILE) + 1, len(HOSTILE) + 1
    shown.wait_drawn(first, first + count)
    box = shown.page.locator("#timeline .nsewdrag.drag").first.bounding_box()
    for place in range(count):
        shown.page.mouse.move(box["x"] + (place + 0.5) / count * box["width"], box["y"] + box["height"] / 2)
    shown.go(at=first)
    shown.wait_cursor(first)
    shown.wait_text("#readout", HOSTILE[0])
    for name, page in PAGES.items():
        shown.open_tab(name, page.TITLE)
        for place in range(shown.page.locator("#panel .js-plotly-plot").count()):
            middle = shown.page.evaluate(_MIDDLE, place)  # at once: a page may still put another graph in its place
            if middle is not None:
                shown.page.mouse.move(*middle)
        assert shown.page.inner_text("#note") == "", name
        assert shown.page.title() == "memprof", name
        assert shown.page.evaluate(_FOREIGN) == [], name


def test_hostile_search_and_address_are_text(look: Show, gpt: Served) -> None:
    """What is typed, or stands in a link, is text as well."""
    shown = look(gpt, "find=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E&tab=%3Cscript%3E&at=99999999999&first=-7&end=x")
    shown.wait_text("#live-table", "<img src=x onerror=alert(1)>")
    shown.wait_drawn(2048, 3072)


def test_empty_recording_says_so(show: Show, serve: Serve, tmp_path: Path) -> None:
    """A recording without operators is explained on every tab, not left blank."""
    path = write(tmp_path / "empty.memprof", make_tables([[]], []))
    shown = show(serve(path), is_drawn=False)
    shown.wait_text("#facts", "contains no operators")
    for name, page in PAGES.items():
        shown.open_tab(name, page.TITLE)
        assert shown.page.inner_text("#note") == "", name
    for key in ("ArrowRight", "p", "+", "Home"):
        shown.page.keyboard.press(key)
    shown.wait_idle()


@pytest.fixture(scope="module")
def damaged(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A dashboard of four recordings: of one operator, cut short, with a damaged table, and deleted unread."""
    folder = tmp_path_factory.mktemp("damaged")
    tables = make_tables([[Op(makes=["a"])]], [Storage("a", 1024)])
    capture = dataclasses.replace(Capture(), is_complete=False, ends_at="step 1, forward", reason="killed by signal 9")
    paths = [
        write(folder / "one.memprof", tables),
        write(folder / "cut.memprof", tables, capture=capture),
        write(folder / "bad.memprof", tables),
        write(folder / "gone.memprof", tables),
    ]
    data = bytearray(paths[2].read_bytes())
    at = data.index(b"storages.parquetPAR1") + 16
    data[at + 20 : at + 60] = bytes(40)
    paths[2].write_bytes(data)
    served = serve(*paths)
    paths[3].unlink()
    return served


def test_one_operator(look: Show, damaged: Served) -> None:
    """The smallest recording is drawn, with its one column and its peak."""
    shown = look(damaged, "trace=0", is_drawn=False)
    shown.wait_drawn(0, 1)
    assert shown.figure()["notes"][-1] == "peak 1.00 KiB"
    for key in ("ArrowRight", "+", "-", "Home"):
        shown.page.keyboard.press(key)
    shown.wait_cursor(0)


def test_truncated_recording_says_where_it_ends(look: Show, damaged: Served) -> None:
    """The page of a killed job's recording says that it was killed."""
    shown = look(damaged, "trace=1", is_drawn=False)
    shown.wait_text("#facts", "ended early in step 1, forward: killed by signal 9")


def test_corrupt_table_is_told_on_the_page(look: Show, damaged: Served) -> None:
    """A recording damaged after its manifest opens, and says what cannot be read, wherever it would be shown."""
    shown = look(damaged, "trace=2", is_drawn=False)
    shown.wait_text("#facts", "is damaged")
    shown.wait_text("#live-table", "damaged")


def test_trace_deleted_while_open(look: Show, damaged: Served) -> None:
    """A file that disappears before it was read is reported; the page stays."""
    shown = look(damaged, "trace=3", is_drawn=False)
    shown.wait_text("#facts", "gone.memprof")
    shown.wait_text("#facts", "Cannot show this page")


def test_server_killed_while_the_page_is_open(show: Show, tmp_path: Path, small_tables: Tables) -> None:
    """What was drawn stays, and no exception comes of it."""
    import threading

    from werkzeug.serving import make_server

    from memprof_dashboard.app import create_app
    from memprof_dashboard.sources import Workspace

    sources = open_sources([write(tmp_path / "run.memprof", small_tables)])
    server = make_server("127.0.0.1", 0, create_app(sources, token="t").server, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    shown = show(Served(f"http://127.0.0.1:{server.port}", "t", Workspace(sources)))
    shown.wait_idle()
    server.shutdown()
    server.server_close()
    shown.expected += ["ERR_(CONNECTION_(REFUSED|RESET)|EMPTY_RESPONSE)", "Failed to fetch", "Callback failed"]
    with shown.page.expect_event("requestfailed"):
        shown.page.keyboard.press("ArrowLeft")
    assert shown.page.locator("#timeline .main-svg .scatterlayer .trace").count() > 0
    assert not [complaint for complaint in shown.complaints if complaint.startswith("exception")]


@pytest.mark.parametrize("what", ["not a zip", "newer", "missing"])
def test_what_cannot_be_opened_is_told_at_once(tmp_path: Path, small_tables: Tables, what: str) -> None:
    """A file that is missing, not a recording, or of a newer memprof ends the command with a message."""
    path = tmp_path / "run.memprof"
    if what == "not a zip":
        path.write_bytes(b"hello")
    elif what == "newer":
        write(path, small_tables)
        path.write_bytes(path.read_bytes().replace(b'"schema_version":2', b'"schema_version":9'))
    with pytest.raises(BadInputError, match=r"run\.memprof"):
        open_sources([path])


def test_a_job_before_its_first_step_is_waited_for(tmp_path: Path, small_tables: Tables) -> None:
    """The command says once what it waits for, and opens the recording as soon as it holds operators."""
    spool = tmp_path / "run.memprof.spool"
    spool.mkdir()
    (spool / "launch.json").write_text(LAUNCH)
    said: list[str] = []

    def begin(sentence: str) -> None:
        said.append(sentence)
        (spool / "launch.json").unlink()
        write(spool / "rank0.memprof", small_tables)

    sources = open_started([spool], begin)
    assert said == [f"waiting for the first training step of {spool}; Ctrl-C stops"]
    assert sources[0].rank(-1).history.ops > 0


def test_a_job_that_ends_while_it_is_waited_for_is_opened(tmp_path: Path, small_tables: Tables) -> None:
    """A short job packs its recording between two looks."""
    spool = tmp_path / "run.memprof.spool"
    spool.mkdir()
    launch = spool / "launch.json"
    launch.write_text(LAUNCH)

    def end(_: str) -> None:
        launch.unlink()
        spool.rmdir()
        write(tmp_path / "run.memprof", small_tables)

    (source,) = open_started([spool], end)
    assert source.name == "run.memprof"
    assert source.rank(-1).history.ops > 0


def test_a_range_or_a_cursor_in_the_address_is_kept(tmp_path: Path, small_tables: Tables) -> None:
    """A running job is followed until something is chosen: a range, or the cursor alone, as in a shared address."""
    path = tmp_path / "run.memprof"
    write(path, small_tables)
    workspace = Workspace(open_sources([path]))
    assert follows(workspace, "", None)
    assert follows(workspace, "?tab=leaks", None)
    chosen = View(at=0)
    assert not follows(workspace, chosen.to_search(), chosen.to_json())
    zoomed = View(first=0, end=1, at=0)
    assert not follows(workspace, zoomed.to_search(), zoomed.to_json())
