"""Access control: requests without a token, from other sites, or from broken browsers."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dash")

from flask.testing import FlaskClient
from werkzeug.test import Client

from memprof_dashboard import serve
from memprof_dashboard.app import create_app
from memprof_dashboard.guard import LARGEST_REQUEST_BYTES, Opening, guarded_app, new_token, own_path
from memprof_dashboard.sources import open_sources

TOKEN = "the-token-of-this-test"
HOME = f"/{own_path(TOKEN)}"
UPDATE = f"{HOME}_dash-update-component"


@pytest.fixture
def app(small_file: Path) -> Any:
    return create_app(open_sources([small_file]), token=TOKEN)


@pytest.fixture
def stranger(app: Any) -> FlaskClient:
    """A browser that was never given the address."""
    client: FlaskClient = app.server.test_client()
    return client


@pytest.fixture
def friend(app: Any) -> FlaskClient:
    """A browser that opened the address."""
    client: FlaskClient = app.server.test_client()
    assert client.get(f"/?token={TOKEN}").status_code == 302
    return client


def test_the_printed_address_opens_it(friend: FlaskClient) -> None:
    """The token becomes a cookie that scripts cannot read and other sites cannot send; the view stays."""
    answer = friend.get(f"{HOME}?token={TOKEN}&tab=live&at=3")
    assert (answer.status_code, answer.headers.get("Location")) == (200, None)
    fresh = friend.application.test_client().get(f"/?token={TOKEN}&tab=live&at=3")
    assert fresh.headers["Location"] == f"{HOME}?tab=live&at=3"
    cookie = fresh.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie


def test_the_page_is_served_while_the_rest_is_imported(app: Any) -> None:
    """The page and its scripts come at once, to friends alone; data once the app is there."""
    made: Future[Any] = Future()
    opening = Opening(guarded_app(TOKEN, ["localhost"], "/"), made)
    assert Client(opening).get("/").status_code == 403
    browser = Client(opening)
    assert browser.get(f"/?token={TOKEN}").status_code == 302
    page = browser.get(HOME)
    own = app.server.test_client().get(f"/?token={TOKEN}", follow_redirects=True)
    pages = [re.sub(r'"end_id":"[^"]*"', "", answer.text) for answer in (page, own)]  # of each app's own secret
    assert pages[0] == pages[1]
    (script,) = re.findall(r'<script src="([^"]*plotly.min.js)"', page.text)
    assert browser.get(script).status_code == 200
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(browser.get(f"{HOME}_dash-layout")))
    asking.start()
    asking.join(0.05)
    assert asking.is_alive()
    made.set_result(app)
    asking.join()
    assert "memprof" in answers[0].text


def test_the_app_is_set_up_before_it_is_used(small_file: Path) -> None:
    """Scripts are asked for several at a time: of those that overtook dash's own set-up none would be served."""
    made: Future[Any] = Future()
    serve._make(made, None, lambda: open_sources([small_file]), token=TOKEN)  # type: ignore[arg-type]
    assert made.result().registered_paths


@pytest.mark.parametrize(
    "path", ["/", "/?token=", "/?token=wrong", f"/?token={TOKEN}x", "/_dash-layout", "/_dash-dependencies", "/nothing"]
)
def test_without_the_token_nothing_is_told(stranger: FlaskClient, path: str) -> None:
    """A missing or wrong token is refused, whatever is asked for, and the answer says what to do."""
    answer = stranger.get(path)
    assert answer.status_code == 403
    assert "memprof printed" in answer.text


def test_a_post_needs_the_cookie(stranger: FlaskClient) -> None:
    """The token in a POST's address is not enough: a form of another site could send it."""
    assert stranger.post(f"{UPDATE}?token={TOKEN}", json={}).status_code == 403
    assert stranger.post(UPDATE, json={}).status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8050", "127.0.0.1.evil.example", "localhost.evil"])
def test_foreign_names_are_refused(friend: FlaskClient, host: str) -> None:
    """A host name that others point to this machine (DNS rebinding) is refused, with or without the token."""
    assert friend.get(f"{HOME}", headers={"Host": host}).status_code in (400, 403)
    assert friend.get(f"{HOME}?token={TOKEN}", headers={"Host": host}).status_code in (400, 403)


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1:1", "[::1]:8050"])
def test_own_names_are_answered_at_any_port(app: Any, host: str) -> None:
    """Through a tunnel the port is another."""
    client = app.server.test_client()
    assert client.get(f"/?token={TOKEN}", headers={"Host": host}).status_code == 302


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_pages_of_other_sites_are_refused(friend: FlaskClient, headers: dict[str, str]) -> None:
    """A page of another site, or of another port of this machine, gets nothing, even from the right browser."""
    assert friend.get(f"{HOME}_dash-layout", headers=headers).status_code == 403
    assert friend.post(UPDATE, json={}, headers=headers).status_code == 403


def test_large_requests_are_refused(friend: FlaskClient) -> None:
    """More than a callback ever sends is not read."""
    body = json.dumps({"output": "x" * LARGEST_REQUEST_BYTES})
    assert friend.post(UPDATE, data=body, content_type="application/json").status_code == 413


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../sources.py",
        "/assets/%2e%2e/sources.py",
        "/assets/..%2fsources.py",
        "/assets//etc/passwd",
        "/_dash-component-suites/memprof_dashboard/../../etc/passwd",
        "/_dash-component-suites/dash/..%2f..%2fdash.py",
        "/_dash-component-suites/os/path.py",
    ],
)
def test_no_other_file_is_served(friend: FlaskClient, path: str) -> None:
    """No path leads out of the assets: what is answered is never that file, and never a fault."""
    for place in (path, f"{HOME.rstrip('/')}{path}"):
        answer = friend.get(place)
        assert answer.status_code < 500
        assert "import" not in answer.text
        assert "root:" not in answer.text


def test_headers_keep_the_page_to_itself(friend: FlaskClient) -> None:
    """No inline script but dash's own, no eval, no other site, no frame around it, no address given away."""
    headers = friend.get(f"{HOME}").headers
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert "unsafe" not in policy["script-src"]
    assert "http" not in headers["Content-Security-Policy"]
    assert policy["frame-ancestors"] == policy["object-src"] == "'none'"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cache-Control"] == "no-store"


def test_the_cookie_is_sent_to_its_own_dashboard_alone(small_file: Path, friend: FlaskClient) -> None:
    """Its path is one that no other server on the machine has, and that does not follow from the dashboard's name."""
    others = [create_app(open_sources([small_file]), token=f"another {number}") for number in range(2)]
    fresh = friend.application.test_client().get(f"/?token={TOKEN}")
    assert f"Path={HOME}" in fresh.headers["Set-Cookie"]
    paths = {HOME, *(str(other.config.requests_pathname_prefix) for other in others)}
    assert len(paths) == 3
    assert TOKEN not in HOME
    assert min(map(len, paths)) > 20
    assert friend.get("/_dash-layout").status_code == 403  # below another path the browser sends no cookie


def test_below_a_proxy_it_is_the_same(small_file: Path) -> None:
    """With a prefix, the printed address leads below it."""
    client = create_app(open_sources([small_file]), token=TOKEN, prefix="/jobs/").server.test_client()
    answer = client.get(f"/jobs/?token={TOKEN}")
    assert answer.headers["Location"] == f"/jobs{HOME}"
    assert client.get(answer.headers["Location"]).status_code == 200


def test_tokens_are_long_and_never_the_same() -> None:
    """Nobody guesses one."""
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 32


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b"null",
        b"[" * 200_000,
        b'{"output": ' * 20_000,
        b'{"output": "facts.children", "inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"{}",
        b'{"output": 3}',
        b'{"output": "../../etc/passwd.x", "inputs": []}',
        b'{"output": "facts.children", "inputs": "x", "outputs": {}, "changedPropIds": []}',
        b'{"output": "facts.children", "inputs": [null], "outputs": {"id": "facts", "property": "children"}}',
        b'{"output": "facts.children", "inputs": [], "outputs": {"id": "facts", "property": "children"}}',
    ],
)
def test_malformed_requests_are_no_fault(friend: FlaskClient, body: bytes) -> None:
    """What no page of ours sends is refused as a bad request."""
    answer = friend.post(UPDATE, data=body, content_type="application/json")
    assert 400 <= answer.status_code < 500, answer.text


#: What the browser says of a zoom beside its range.
ZOOM = {"count": 1, "trace": 0, "rank": -1, "axis": "ops"}
WEIRD = [None, 0, -1, 2**70, -(2**70), 1.5, "", "x", "9" * 3_000, [], {}, [1], {"points": "x"}, True]


@pytest.mark.parametrize("field", ["trace", "rank", "other", "first", "end", "at", "storage", "find", "budget", "tab"])
@pytest.mark.parametrize("output", ["facts.children", "readout.children", "panel.children", "overview.figure"])
def test_views_that_make_no_sense(friend: FlaskClient, app: Any, output: str, field: str) -> None:
    """Whatever stands in a field of the view, the answer is a picture of something, and no fault."""
    for value in WEIRD:
        answer = friend.post(UPDATE, json=_body(app, output, {field: value}))
        assert answer.status_code in (200, 204), (value, answer.text)
        assert "Something went wrong" not in answer.text, value


@pytest.mark.parametrize(
    ("trigger", "value"),
    [
        ("timeline.clickData", {"points": [{"x": 1e400}]}),
        ("timeline.clickData", {"points": [{"x": "nan"}]}),
        ("timeline.clickData", {"points": []}),
        ("timeline.clickData", {"points": {"x": 1}}),
        ("timeline.clickData", {"points": [{"x": -(10**30)}]}),
        ("zoomed.data", {**ZOOM, "xaxis.range": [1e308, 2e308]}),
        ("zoomed.data", {**ZOOM, "xaxis.range": 5}),
        ("zoomed.data", {**ZOOM, "xaxis.range[0]": "x", "xaxis.range[1]": None}),
        ("zoomed.data", {**ZOOM, "xaxis.range[0]": 10**400, "xaxis.range[1]": 3}),
        ("zoomed.data", {**ZOOM, "xaxis.range": [0, 5], "rank": [1]}),
        ("zoomed.data", [3]),
        ("key.data", {"key": {"a": 1}, "shift": "x"}),
        ("key.data", "p"),
        ("go.data", {"self": 1, "first": "x", "name": None}),
        ("go.data", {"first": 10**30}),
        ("trace.value", 99),
        ("trace.value", "x"),
        ("rank.value", -5),
        ("tabs.value", "<script>"),
        ("budget.value", "9" * 100 + "%"),
        ("budget.value", "-1e400GiB"),
        ("url.search", "?at=--5&first=x&trace=99999999999999999999&tab=%00&find=%ff&rank=٣"),
        ("url.search", "?" + "at=1&" * 5_000),
        ("url.search", 5),
    ],
)
def test_events_that_make_no_sense(friend: FlaskClient, app: Any, trigger: str, value: Any) -> None:
    """Invalid clicks, keys and addresses leave the view unchanged, or nearly, without an error."""
    name, _, what = trigger.partition(".")
    answer = friend.post(UPDATE, json=_event(app, name, what, value, {}))
    assert answer.status_code in (200, 204), answer.text
    assert "Something went wrong" not in answer.text
    if value is not None:
        first = friend.post(UPDATE, json=_event(app, name, what, value, None))  # as the first thing that is asked
        assert first.status_code in (200, 204), first.text
        assert "Something went wrong" not in first.text


def _callback(app: Any, output: str) -> dict[str, Any]:
    found: dict[str, Any] = next(
        callback for callback in app._callback_list if callback["output"].strip(".").startswith(output)
    )
    return found


def _body(app: Any, output: str, view: Any) -> dict[str, Any]:
    """Returns what a browser would send to a callback whose inputs are parts of the view."""
    app._setup_server()
    callback = _callback(app, output)

    def filled(part: dict[str, Any]) -> dict[str, Any]:
        return {**part, "value": "light" if part["id"] == "theme" else view}

    name, _, what = output.rpartition(".")
    return {
        "output": callback["output"],
        "outputs": {"id": name, "property": what},
        "inputs": [filled(part) for part in callback["inputs"]],
        "state": [filled(part) for part in callback["state"]],
        "changedPropIds": [f"{callback['inputs'][0]['id']}.{callback['inputs'][0]['property']}"],
        "parsedChangedPropsIds": [],
    }


def _event(app: Any, name: str, what: str, value: Any, view: Any) -> dict[str, Any]:
    """Returns what a browser would send when something happened, to the callback that makes the view."""
    app._setup_server()
    callback = _callback(app, "view.data")

    def filled(part: dict[str, Any]) -> dict[str, Any]:
        return {**part, "value": value if (part["id"], part["property"]) == (name, what) else None}

    return {
        "output": callback["output"],
        "outputs": [{"id": "view", "property": "data"}, {"id": "url", "property": "search"}],
        "inputs": [filled(part) for part in callback["inputs"]],
        "state": [{**part, "value": value if part["id"] == name else view} for part in callback["state"]],
        "changedPropIds": [f"{name}.{what}"],
        "parsedChangedPropsIds": [],
    }


def test_silent_clients_are_disconnected_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection has a thread: of 80 that say nothing, 64 are kept, for a second."""

    def answer(environ: Any, start: Callable[..., Any]) -> list[bytes]:
        start("200 OK", [("Content-Length", "2")])
        return [b"ok"]

    monkeypatch.setattr(serve._Handler, "timeout", 1.0)
    server = serve.Server("127.0.0.1", 0, answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        before = threading.active_count()
        clients = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(80)]
        assert clients[-1].recv(1) == b""
        assert threading.active_count() - before <= 64
        assert [client.recv(1) for client in clients] == [b""] * 80
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/") as page:
            assert page.read() == b"ok"
        for client in clients:
            client.close()
    finally:
        server.shutdown()
        server.server_close()
