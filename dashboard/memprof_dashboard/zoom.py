"""Columns of a whole recording, which the browser fetches once and zooms by itself (``assets/zoom.js``)."""

from __future__ import annotations

import json

import numpy as np
from dash import ClientsideFunction, Dash, Input, State
from flask import Response, request

from memprof.errors import MemprofError
from memprof_dashboard import ids
from memprof_dashboard.figures.timeline import area_look, phase_looks
from memprof_dashboard.sources import Rank, Workspace
from memprof_dashboard.state import View
from memprof_dashboard.views.groups import storages_found

#: Most columns sent; a recording with at most as many operators is sent exactly.
_MOST = 32_768


def register(app: Dash, workspace: Workspace) -> None:
    """Registers the address of the columns, and the callbacks in the browser that fetch and draw them."""

    def send() -> Response:
        view = View.from_search(f"?{request.query_string.decode(errors='replace')}")
        try:
            packed = pack_columns(workspace.rank(view.trace, view.rank), view.find)
        except MemprofError:
            return Response(status=204)  # the verdict's place has the reason
        return Response(packed, mimetype="application/octet-stream", headers={"Cache-Control": "no-store"})

    app.server.add_url_rule(f"{app.config.routes_pathname_prefix}columns", "columns", send)
    app.clientside_callback(  # type: ignore[no-untyped-call]  # dash has no types for it
        ClientsideFunction("memprof", "hold"),
        Input(ids.DRAWN_AT, "data"),
        Input(ids.PHASES, "children"),
        State(ids.WINDOW, "data"),
    )
    app.clientside_callback(  # type: ignore[no-untyped-call]  # dash has no types for it
        ClientsideFunction("memprof", "zoom"),
        *(Input(name, "relayoutData") for name in (ids.TIMELINE, ids.TIMELINE_OTHER, ids.OVERVIEW)),
        prevent_initial_call=True,
    )


def pack_columns(rank: Rank, find: str = "") -> bytes:
    """Returns the fullest operator of each of many equally wide columns of a recording.

    Args:
        rank: The recording.
        find: The view's search text.

    Returns:
        The length of a JSON header as a little-endian uint32, the header, then arrays: float64 ``total`` and ``lowest``
        bytes, with a clock the float64 ms at which columns begin and the last ends, with a search float64 ``found``;
        float32 bytes of each area; and uint8 phases, as places in the header's list. The header is padded, so that
        arrays begin at a multiple of eight bytes.
    """
    history = rank.history
    ops = 0 if rank.is_end_state else history.ops
    width = max(-(-ops // _MOST), 1)
    left = np.arange(0, ops, width)
    rows = np.pad(history.total[:ops], (0, len(left) * width - ops), mode="edge").reshape(-1, width)
    op_ids = left + rows.argmax(axis=1)
    wide = [history.total[op_ids], rows.min(axis=1)]
    if rank.clock is not None:
        wide.append(rank.clock[np.append(left, ops)])
    chosen = storages_found(rank, find)
    if chosen is not None:
        wide.append(history.bytes_of(chosen)[op_ids])
    areas = {name: history.alive_bytes(name, op_ids) for name in history.categories}
    areas = {name: alive for name, alive in areas.items() if alive.any()}
    header = {
        "ops": ops,
        "width": width,
        "count": len(left),
        "hasClock": rank.clock is not None,
        "hasFound": chosen is not None,
        "areas": [area_look(name) for name in areas],
        "phases": phase_looks(history),
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(4 + len(text)) % 8)
    phases = np.where(history.runs_again[op_ids], len(history.phases), history.phase[op_ids])
    return b"".join(
        (
            len(text).to_bytes(4, "little"),
            text,
            *(values.astype("<f8").tobytes() for values in wide),
            *(alive.astype("<f4").tobytes() for alive in areas.values()),
            phases.astype(np.uint8).tobytes(),
        )
    )
