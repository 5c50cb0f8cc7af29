"""The registry of pages: every tab, every name in an address, and what an unknown name gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dash")

from dash import Dash, html

from memprof_dashboard.app import create_app
from memprof_dashboard.guard import own_path
from memprof_dashboard.pages import PAGES
from memprof_dashboard.sources import Workspace, open_sources
from memprof_dashboard.state import View

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
