"""Access control: only browsers that have the dashboard's address may use it, and no page of another site.

The browser is served the page's frame and its scripts while the rest of the dashboard is still imported.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlencode

from dash import Dash, html
from dash.exceptions import CallbackException, DependencyException, InvalidCallbackReturnValue
from flask import Flask, Response, abort, redirect, request

#: Largest request that is read; a callback's is below 20 kB.
LARGEST_REQUEST_BYTES = 256 * 1024

#: Exceptions that dash raises for malformed requests.
_MALFORMED = (
    *(AttributeError, CallbackException, DependencyException, IndexError, KeyError),
    *(RecursionError, TypeError, ValueError),
)

#: The path of plotly.js below the dashboard's own, as ``dcc.Graph`` asks for it.
_PLOTLY = "_dash-component-suites/plotly/package_data/plotly.min.js"

_COOKIE = "memprof_token"
_PARAMETER = "token"


def new_token() -> str:
    """Returns an unguessable token."""
    return secrets.token_urlsafe(24)


def own_path(token: str) -> str:
    """Returns a dashboard's path below its prefix, unguessable and unique to it."""
    return f"{hashlib.sha256(b'path:' + token.encode()).hexdigest()[:24]}/"


def guard(app: Dash, token: str, hosts: Sequence[str]) -> None:
    """Accepts only requests that carry the token and are addressed to one of the dashboard's host names.

    On a shared machine others reach its port too, and a page of any other site can make a browser send it requests. The
    token is in the address that is opened; the answer to that keeps it in a cookie. Browsers send cookies to every port
    of a host, but only below a cookie's own path: the path of the dashboard is its own and cannot be guessed, so that
    no other server on this machine is sent the cookie, and no other dashboard replaces it.

    Args:
        app: The dashboard, served below ``own_path``.
        token: What a browser must present.
        hosts: Names in the address, such as ``127.0.0.1``; any port, since a tunnel has its own.
    """
    home = str(app.config.requests_pathname_prefix)
    server: Flask = app.server
    server.config["MAX_CONTENT_LENGTH"] = LARGEST_REQUEST_BYTES
    known = {host.lower() for host in hosts}

    @server.before_request
    def check() -> Response | None:
        if _name_of(request.host) not in known:
            abort(403, "The dashboard is not served under this host name.")
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != request.host:
            abort(403, "Cross-site request refused.")
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            abort(403, "Cross-site request refused.")
        if hmac.compare_digest(request.cookies.get(_COOKIE, "").encode(), token.encode()):
            return None
        if request.method != "GET" or not hmac.compare_digest(
            request.args.get(_PARAMETER, "").encode(), token.encode()
        ):
            abort(403, "Missing or wrong token: open the address that memprof printed.")
        kept = request.args.to_dict()
        del kept[_PARAMETER]
        answer = redirect(f"{home}?{urlencode(kept)}" if kept else home)
        answer.set_cookie(_COOKIE, token, path=home, httponly=True, samesite="Strict")
        return answer  # type: ignore[return-value]  # werkzeug's response is what flask sends

    def refuse(error: Exception) -> tuple[str, int]:
        # Errors in a callback are shown on the page; this one occurred before a callback was found.
        if "/_dash-" not in request.path or isinstance(error, InvalidCallbackReturnValue):
            raise error
        return "Malformed request.", 400

    for kind in _MALFORMED:
        server.register_error_handler(kind, refuse)

    @server.after_request
    def seal(answer: Response) -> Response:
        scripts = " ".join(f"'{digest}'" if not digest.startswith("'") else digest for digest in app.csp_hashes())
        answer.headers["Content-Security-Policy"] = (
            f"default-src 'self'; script-src 'self' {scripts}; style-src 'self' 'unsafe-inline'; "
            "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
            "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        answer.headers["X-Content-Type-Options"] = "nosniff"
        answer.headers["Referrer-Policy"] = "no-referrer"
        answer.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        answer.headers["Cross-Origin-Opener-Policy"] = "same-origin"
        answer.headers["X-Frame-Options"] = "DENY"
        if answer.mimetype in ("text/html", "application/json"):
            answer.headers["Cache-Control"] = "no-store"  # keeps recorded data out of the browser's cache
        return answer


def _name_of(host: str) -> str:
    """Returns a host without its port."""
    if host.startswith("["):
        return host.partition("]")[0].lstrip("[").lower()
    return host.partition(":")[0].lower()


def guarded_app(
    token: str, hosts: Sequence[str], prefix: str, on_error: Callable[[Exception], Any] | None = None
) -> Dash:
    """Returns an app whose page has no content yet; arguments as for ``create_app``."""
    prefix = f"{prefix}{own_path(token)}"
    app = Dash(
        "memprof_dashboard",
        title="memprof",
        update_title="",
        serve_locally=True,
        suppress_callback_exceptions=True,
        requests_pathname_prefix=prefix,
        routes_pathname_prefix=prefix,
        external_scripts=[f"{prefix}{_PLOTLY}"],  # in the page from its beginning, not only once a chart is laid out
        on_error=on_error,
        add_log_handler=False,
        pages_folder="",
        include_pages_meta=False,
        enable_mcp=False,
    )
    app.index_string = app.index_string.replace("<html>", '<html lang="en">')
    app.layout = html.Div()
    guard(app, token, hosts)
    return app


class Opening:
    """The WSGI application: pages and scripts at once, what is in a recording as soon as the app is there."""

    def __init__(self, frame: Dash, app: Future[Dash]) -> None:
        """Stores both apps, which have the same token, host names and prefix."""
        self._frame, self._app = frame, app

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answers a request; one for data waits for the app, and fails as its making did."""
        path = environ["PATH_INFO"]
        is_data = "/_dash-" in path and "/_dash-component-suites/" not in path
        app = self._app.result() if is_data or self._app.done() else self._frame
        return app.server(environ, start_response)  # type: ignore[no-any-return]
