"""What the browser is served while the rest of the dashboard is still imported: the page's frame and its scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from dash import Dash, html

from memprof_dashboard.guard import guard, own_path

#: The path of plotly.js below the dashboard's own, as ``dcc.Graph`` asks for it.
_PLOTLY = "_dash-component-suites/plotly/package_data/plotly.min.js"


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
