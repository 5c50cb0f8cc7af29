"""The registry of pages, and what of the view stands in an address and in the browser's stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dash import Dash, html
from hypothesis import given
from hypothesis import strategies as st
from plotly.utils import PlotlyJSONEncoder

from memprof.trace.manifest import Manifest
from memprof.trace.schema import HostLimits, HostMemory, Ops
from memprof.trace.store import Trace
from memprof_dashboard.app import create_app
from memprof_dashboard.guard import own_path
from memprof_dashboard.pages import PAGES, empty_pages
from memprof_dashboard.pages.host import HostPage, _figure
from memprof_dashboard.sources import Source, Workspace, open_sources
from memprof_dashboard.state import View
from tests.analysis.test_host_memory import samples as host_samples
from tests.building import Tables

pytest.importorskip("dash")


TOKEN = "the-token-of-this-test"


class NotesPage:
    """A page that is added by the test."""

    TITLE = "Notes"

    def __init__(self) -> None:
        self.is_registered = False

    def layout(self, workspace: Workspace, view: View) -> Any:
        return html.P(f"notes on {workspace.source(view.trace).name} at {view.at}")

    def register(self, app: Dash, workspace: Workspace) -> None:
        self.is_registered = True


def panel(app: Dash, search: str) -> str:
    """Returns what stands below the timeline, as JSON, for the query of an address."""
    app._setup_server()
    callback = next(one for one in app._callback_list if one["output"] == "panel.children")
    client = app.server.test_client()
    assert client.get(f"/?token={TOKEN}").status_code == 302
    body = {
        "output": callback["output"],
        "outputs": {"id": "panel", "property": "children"},
        "inputs": [{**part, "value": View.from_search(search).to_json()} for part in callback["inputs"]],
        "state": [],
        "changedPropIds": ["place.data"],
        "parsedChangedPropsIds": [],
    }
    answer = client.post(f"/{own_path(TOKEN)}_dash-update-component", json=body)
    assert answer.status_code == 200, answer.text
    return json.dumps(json.loads(answer.text)["response"]["panel"]["children"], ensure_ascii=False)


def made(small_file: Path) -> Dash:
    return create_app(open_sources([small_file]), token=TOKEN)


def test_a_page_is_added_by_one_entry(small_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a tab, its callbacks are registered, and its address opens it with the rest of the view."""
    page = NotesPage()
    monkeypatch.setitem(PAGES, "notes", page)
    app = made(small_file)
    assert page.is_registered
    tabs = json.loads(json.dumps(app.layout["tabs"].to_plotly_json(), default=lambda one: one.to_plotly_json()))
    assert [one["props"]["value"] for one in tabs["props"]["children"]] == list(PAGES)
    assert tabs["props"]["children"][-1]["props"]["label"]["props"]["children"] == "Notes"
    assert f"notes on {small_file.name} at 3" in panel(app, "?tab=notes&at=3")
    assert View.from_search(View(tab="notes", at=3).to_search()) == View(tab="notes", at=3)


@pytest.mark.parametrize("name", ["notes", "Live", "../../etc", "<script>"])
def test_an_unknown_page_is_named_with_those_there_are(small_file: Path, name: str) -> None:
    """The default page, below a sentence with the name and the pages there are."""
    app = made(small_file)
    shown = panel(app, f"?tab={name}")
    assert f"unknown page {name!r}: give one of {', '.join(PAGES)}. This is whatif." in shown
    default = panel(app, "")
    assert "unknown page" not in default
    assert default in shown


def test_the_default_page_exists() -> None:
    """What an address without a page opens."""
    assert View().tab in PAGES


def test_host_memory_follows_the_cursor(small_tables: Tables) -> None:
    """The legend of the curve is at the cursor's operator; the range is where operators ran; two samples make none."""
    ops = small_tables[Ops]
    tables = small_tables | {Ops: ops.replace(start_us=1e9 + 1e6 * np.arange(len(ops)))}

    def opened(seconds: int, limit: int) -> Workspace:
        samples = host_samples((7, "trainer", lambda t: 100 + t), (8, "worker", lambda t: 50), seconds=seconds)
        samples = samples.replace(time_us=samples.time_us + 1e9 - 1e6)
        limits = HostLimits.of(time_us=[1e9], name=["machine"], total_bytes=[limit], used_bytes=[limit // 2])
        sampled = tables | {HostMemory: samples, HostLimits: limits}
        trace = Trace.of([(Manifest(target="train.py", pid=7), sampled)], Path("run.memprof"))
        return Workspace([Source(Path("run.memprof"), "run", trace)])

    workspace = opened(6, 2**28)
    assert "host" not in empty_pages(workspace, View())
    shown = json.dumps(HostPage().layout(workspace, View()), cls=PlotlyJSONEncoder)
    assert all(part in shown for part in ("trainer ", "105.00 MiB", "worker ", "50.00 MiB", "host-graph"))
    figure = _figure(workspace, View(first=0, end=4, at=2), "light")
    assert [trace.name for trace in figure.data[1::2]] == ["trainer  103.00 MiB", "workers  50.00 MiB"]
    assert [(one.x0, one.x1) for one in figure.layout.shapes] == [(3, 3), (0, 6), (1, 4)]  # cursor, limit, range
    far = _figure(opened(6, 2**40), View(first=0, end=4, at=2), "light")
    assert [one.text for one in far.layout.annotations] == ["peak 155.00 MiB"]
    workspace = opened(2, 2**28)
    assert "too few samples" in empty_pages(workspace, View())["host"]
    assert "host-graph" not in json.dumps(HostPage().layout(workspace, View()), cls=PlotlyJSONEncoder)


NUMBERS = st.integers(-1, 2**53 - 1)


TEXTS = st.text(max_size=60)


VIEWS = st.builds(
    View,
    trace=NUMBERS,
    rank=NUMBERS,
    tab=st.sampled_from(list(PAGES)),
    first=NUMBERS,
    end=NUMBERS,
    at=NUMBERS,
    other=NUMBERS,
    storage=NUMBERS,
    find=TEXTS.filter(lambda text: not any("\ud800" <= letter <= "\udfff" for letter in text)),
    budget=st.from_regex(r"[0-9]{1,5}(\.[0-9])?(GiB|%|)", fullmatch=True),
)


@given(view=VIEWS)
def test_the_address_and_the_store_restore_a_view(view: View) -> None:
    """Whatever is looked at comes back from both."""
    assert View.from_search(view.to_search()) == view
    assert View.from_json(view.to_json()) == view


def test_defaults_are_left_out_of_the_address() -> None:
    """The first view has no address but the page's."""
    assert View().to_search() == ""
    assert View(at=3, find="a b&c").to_search() == "?at=3&find=a+b%26c"


@given(search=st.one_of(st.text(max_size=300), st.builds("?at={}&first={}".format, st.text(), st.integers())))
def test_any_address_gives_a_view(search: str) -> None:
    """Nothing that can be typed is a fault, and all fields are sound."""
    view = View.from_search(search)
    assert View.from_json(view.to_json()) == view


@pytest.mark.parametrize(
    ("search", "view"),
    [
        ("?at=7&at=8", View(at=8)),
        ("?at=-2", View()),
        ("?at=1e3", View()),
        ("?at=--5", View()),
        ("?at=٣", View()),
        ("?at=99999999999999999999", View()),
        ("?tab=" + "x" * 201 + "&at=4", View(at=4)),
        ("?nothing=1&self=2", View()),
        ("?find=" + "x" * 201, View()),
        (None, View()),
        (5, View()),
    ],
)
def test_what_makes_no_sense_takes_its_default(search: Any, view: View) -> None:
    """Numbers that are none or too large, unknown names, overlong texts."""
    assert View.from_search(search) == view


@pytest.mark.parametrize("fields", [None, [], "x", {"at": True}, {"at": 1.5}, {"at": "3"}, {"tab": 3}, {"find": None}])
def test_stores_that_make_no_sense(fields: Any) -> None:
    """A browser can send anything."""
    assert View.from_json(fields) == View()


def test_a_change_that_makes_no_sense_changes_nothing() -> None:
    """Unknown fields and unsound values stay out."""
    view = View(at=3)
    assert view.change(at="x", tab=3, self=1, name=2) == view
    assert view.change(at=4, tab="blocks") == View(at=4, tab="blocks")
