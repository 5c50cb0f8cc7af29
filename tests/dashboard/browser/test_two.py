"""Several dashboards in one browser, next to another server on the same machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dash")
pytest.importorskip("playwright")

from werkzeug.serving import make_server

from memprof_dashboard.app import create_app
from memprof_dashboard.guard import own_path
from memprof_dashboard.sources import open_sources


@contextmanager
def running(server: Any) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def dashboard(file: Path, token: str) -> Any:
    app = create_app(open_sources([file]), token=token)
    return make_server("127.0.0.1", 0, app.server, threaded=True)


class _Stranger(BaseHTTPRequestHandler):
    """Another server on this machine; it notes what it is sent."""

    sent: list[str]

    def do_GET(self) -> None:
        self.sent.append(f"{self.path}\n{self.headers}")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<title>a stranger</title>")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as its parent names it
        """Says nothing."""


@pytest.mark.slow
def test_two_dashboards_in_one_browser(browser: Any, small_file: Path) -> None:
    """Both are there after a reload of each, and no other server is sent a token, a cookie or an address of theirs."""
    sent: list[str] = []
    stranger = HTTPServer(("127.0.0.1", 0), type("Stranger", (_Stranger,), {"sent": sent}))
    tokens = ("token-of-the-first", "token-of-the-second")
    with (
        running(dashboard(small_file, tokens[0])) as one,
        running(dashboard(small_file, tokens[1])) as two,
        running(stranger) as third,
    ):
        context = browser.new_context()
        pages = []
        for port, token in ((one, tokens[0]), (two, tokens[1])):
            page = context.new_page()
            page.set_default_timeout(60_000)
            page.goto(f"http://127.0.0.1:{port}/?token={token}")
            pages.append(page)
        for page in (*pages, *reversed(pages)):
            assert page.reload().status == 200
            page.wait_for_selector("#timeline .main-svg")
            assert "token" not in page.url
        other = context.new_page()
        other.goto(f"http://127.0.0.1:{third}/")
        pages[0].evaluate("address => { location.href = address }", f"http://127.0.0.1:{third}/linked")
        pages[0].wait_for_url(f"http://127.0.0.1:{third}/linked")
        context.close()
    assert any(text.startswith("/linked") for text in sent)
    told = "\n".join(sent)
    assert "Cookie" not in told
    assert not any(f":{port}" in told for port in (one, two))  # of where a link was followed
    assert not any(word in told for token in tokens for word in (token, own_path(token)))
