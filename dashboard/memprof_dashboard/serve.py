"""Serves the dashboard: opens the recordings, finds a free port, and opens the browser."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from werkzeug.serving import ThreadedWSGIServer, WSGIRequestHandler
from werkzeug.test import Client

from memprof.errors import MemprofError, NotStartedError, UsageError
from memprof.trace.files.archive import Archive
from memprof.trace.files.reading import parse_json
from memprof.version import SCHEMA_VERSION
from memprof_dashboard.editors import address_of_editor
from memprof_dashboard.whatif.dry_frames import DryFrames

# The address comes before what reads and draws a recording is imported.
if TYPE_CHECKING:
    from dash import Dash

    from memprof_dashboard.sources import Source
    from memprof_dashboard.state import View

#: Number of ports tried after the requested one.
_TRIES = 50
#: glibc's mallopt parameter, and the size in bytes from which an array gets its own pages.
_M_MMAP_THRESHOLD, _LARGE_BYTES = -3, 1 << 20
#: Pause between looks at a job that has not begun to train, in seconds.
_WAIT_S = 0.5
_OWN_NAMES = ("127.0.0.1", "localhost", "::1")
#: Connections at a time, each with a thread; and how long one may stay silent, in seconds.
_MOST_CONNECTIONS, _SILENT_S = 64, 10.0


class _Handler(WSGIRequestHandler):
    timeout = _SILENT_S


class Server(ThreadedWSGIServer):
    """A server with a bounded number of connections, which closes idle ones."""

    def __init__(self, host: str, port: int, app: Any) -> None:
        super().__init__(host, port, app, handler=_Handler)
        self._free = threading.Semaphore(_MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers a connection in a thread of its own, and closes it at once where there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers the requests of a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


def serve(
    paths: list[Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8050,
    prefix: str = "/",
    editor: str = "vscode",
    may_run: bool = False,
    opens_browser: bool = True,
    view: View | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serves the dashboard of some recordings until it is interrupted.

    Args:
        paths: The recordings: files, folders of ranks, or the spool folders of jobs that are running.
        host: Address to listen on.
        port: Port to listen on; where it is taken, the next that is free.
        prefix: Path below which it is served, behind a proxy.
        editor: Name of the editor that source lines are opened in, or the address that opens them.
        may_run: Dry-run jobs that this user recorded here, for plans with policies that change kernels.
        opens_browser: Open the page in a browser.
        view: What it shows first; None for the default.
        say: Called with messages about the page's address.

    A job that is still before its first training step is waited for. The browser reads the page's scripts, half of its
    time to the first plot, while recordings are opened and the rest of the dashboard is imported here.

    Raises:
        BadInputError: A recording cannot be opened.
        UsageError: No port is free, nothing can listen on the address, or the editor is unknown.
    """
    _release_memory()
    address = address_of_editor(editor)
    sources = None if all(map(_is_packed, paths)) else open_started(paths, say)
    with _without_ipython():
        from memprof_dashboard.guard import Opening, guarded_app, new_token

    token = new_token()
    prefix = f"/{prefix.strip('/')}/" if prefix.strip("/") else "/"
    names = _OWN_NAMES if host in _OWN_NAMES else (*_OWN_NAMES, host)
    settings: Any = {"token": token, "hosts": names, "prefix": prefix}
    dry_frames = DryFrames(may_run=may_run)
    frame = guarded_app(**settings)
    made: Future[Dash] = Future()
    server, taken = _listen(Opening(frame, made), host, port)
    settings |= {"editor": address, "dry_frames": dry_frames}
    opened = functools.partial(open_started, paths, say) if sources is None else lambda: sources
    threading.Thread(target=_make, args=(made, server, opened), kwargs=settings, daemon=True).start()
    shown = f"[{host}]" if ":" in host else host
    search = "" if view is None else view.to_search().replace("?", "&")
    url = f"http://{shown}:{server.port}{prefix}?token={token}{search}"
    if server.port != port and port:
        say(f"port {port} is taken, using {server.port}" if taken else "")
    say(f"the dashboard is at {url}")
    say("the address contains an access token: do not share it; Ctrl-C stops the dashboard")
    if opens_browser:
        threading.Thread(target=_open, args=(url, say), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    dry_frames.close()
    server.server_close()
    if made.done() and (error := made.exception()) is not None:
        raise error


def open_started(paths: list[Path], say: Callable[[str], None]) -> list[Source]:
    """Opens recordings, those of running jobs once their first training step has begun, or the job has ended."""
    from memprof_dashboard.sources import open_sources, packed_file

    has_said = False
    while True:
        try:
            return open_sources([packed_file(path) or path for path in paths])
        except NotStartedError:
            if not has_said:
                say(f"waiting for the first training step of {', '.join(map(str, paths))}; Ctrl-C stops")
            has_said = True
            time.sleep(_WAIT_S)


@contextlib.contextmanager
def _without_ipython() -> Iterator[None]:
    """Keeps dash from importing IPython, which it does for notebooks wherever it is installed: a tenth of a second."""
    if "IPython" in sys.modules:
        yield
        return
    sys.modules["IPython"] = None  # type: ignore[assignment]  # importing it raises an ImportError
    try:
        yield
    finally:
        del sys.modules["IPython"]


def _is_packed(path: Path) -> bool:
    """Whether a file is a whole recording, by its manifests; what is not is refused or waited for at first."""
    with contextlib.suppress(MemprofError, KeyError, TypeError, ValueError):
        archive = Archive.open(path)
        top = parse_json(archive.read("manifest.json"), strict=False)
        ranks = archive.read_all([f"rank{number}/manifest.json" for number in top["ranks"]])
        is_known = 1 <= top["schema_version"] <= SCHEMA_VERSION and all(map(parse_json, ranks))
        return path.suffix == ".memprof" and is_known and bool(ranks)
    return False


def _make(made: Future[Dash], server: Server, opened: Callable[[], list[Source]], **settings: Any) -> None:
    """Opens recordings and makes the app; where that fails, the server ends, and requests for the app get the error."""
    try:
        sources = opened()
        threading.Thread(target=_read_ahead, args=(sources[0],), daemon=True).start()
        from memprof_dashboard.app import create_app

        app = create_app(sources, **settings)
        Client(app.server).get("/")  # dash sets an app up in its first request, which others may overtake
        made.set_result(app)
    except BaseException as error:  # noqa: BLE001 - raised again in the thread that serves
        made.set_exception(error)
        server.shutdown()


def _release_memory() -> None:
    """Makes the C library return freed large arrays to the system; by default it keeps some per thread."""
    with contextlib.suppress(OSError, AttributeError):  # only glibc has, and needs, this parameter
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def _read_ahead(source: Source) -> None:
    """Prefetches the data of the first figure while the browser starts."""
    with contextlib.suppress(MemprofError):  # the page reports read errors
        rank = source.rank(-1)
        rank.steps, rank.history, rank.op_names, rank.op_stacks, rank.storage_texts  # noqa: B018 - read once, and kept


def _listen(app: object, host: str, port: int) -> tuple[Server, bool]:
    """Returns a server on the port or the next free one, and whether the port was taken."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # suppresses the line per request
    taken = False
    for number in range(port, port + _TRIES) if port else (0,):
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, number))
        except OSError as error:
            if error.errno in (98, 48) or "in use" in str(error).lower():
                taken = True
                continue
            raise UsageError(f"cannot listen on {host}:{number} ({error.strerror}); try --host 127.0.0.1") from None
        return Server(host, number, app), taken
    raise UsageError(f"ports {port} to {port + _TRIES - 1} are all taken; choose another with --port")


def _open(url: str, say: Callable[[str], None]) -> None:
    """Opens the page in a browser; without one, only the printed address remains."""
    try:
        is_open = webbrowser.open(url)
    except (webbrowser.Error, OSError):
        is_open = False
    if not is_open:
        say("no browser found: open the address in one, on this machine or through ssh -L")
