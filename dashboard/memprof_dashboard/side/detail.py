"""One storage in full, and source lines named by a recording, with links that open an editor."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from dash import html

from memprof.trace.schema import NONE, Saved
from memprof.trace.source_lines import is_source_file
from memprof.units import format_bytes
from memprof_dashboard import parts
from memprof_dashboard.palette import fill_of
from memprof_dashboard.sources import Rank
from memprof_dashboard.state import View, shown
from memprof_dashboard.views.groups import group_alike

#: Most storages of a group that are listed one by one.
_MOST_ALIKE = 64
_MOST_FRAMES = 60


def detail_of(rank: Rank, view: View, editor: str) -> Any:
    """Returns the selected storage in full; None where none is selected.

    Args:
        rank: The recording.
        view: The view.
        editor: The address that opens a source line, as in ``side.editor``.
    """
    history = rank.history
    row = view.storage
    if not 0 <= row < len(history.size):
        return None
    created, freed = int(history.created[row]), int(history.freed[row])
    category = history.storage_categories[history.category[row]]
    first = max(created, 0)
    end = history.ops if freed == NONE else freed + 1
    margin = max((end - first) // 10, 2)
    facts = [
        ("size", f"{format_bytes(int(history.size[row]))} ({int(history.size[row]):,} bytes)"),
        ("category", fill_of(category).label),
        ("name", str(rank.storage_texts["name"][row])),
        ("module", rank.module_title(int(history.owner[row]))),
        ("tensor", f"{rank.storage_texts['shape'][row]} {rank.storage_texts['dtype'][row]}".strip()),
        ("device", str(rank.storage_texts["device"][row])),
        ("allocated by", _operator(rank, created) if created != NONE else "before recording"),
        ("freed after", _operator(rank, freed) if freed != NONE else "not freed while recording"),
        ("why alive", _why(rank, row, category)),
    ]
    module = rank.module_title(int(history.owner[row]))
    title = str(rank.storage_texts["name"][row]) or module or fill_of(category).label
    return [
        html.Div(
            [
                parts.jump("← all live tensors", title="back to the list (Esc)", storage=-1),
                parts.jump("zoom to its lifetime", first=max(first - margin, 0), end=min(end + margin, history.ops)),
            ],
            className="detail-tools",
        ),
        html.H3([parts.name(title, 60), html.Span(f" storage {row:,}", className="soft")]),
        html.Dl([part for label, text in facts if text for part in (html.Dt(label), html.Dd(parts.name(text, 400)))]),
        *_alike(rank, view),
        *_stack(rank, created, editor),
    ]


def _alike(rank: Rank, view: View) -> list[Any]:
    """Returns buttons that select the storages like the selected one that are alive at the cursor."""
    rows = rank.history.alive(shown(view, rank).at)
    rows = rows[rank.history.size[rows] == rank.history.size[view.storage]]
    group = next((one for one in group_alike(rank, rank.tree, rows, "module") if view.storage in one.rows), None)
    if group is None or len(group.rows) < 2:
        return []
    owners = rank.history.owner
    buttons = [
        parts.jump(rank.module_title(int(owners[row])) or f"storage {row:,}", storage=row)
        for row in sorted(group.rows.tolist())[:_MOST_ALIKE]
    ]
    more = f" and {len(group.rows) - _MOST_ALIKE:,} more" if len(group.rows) > _MOST_ALIKE else ""
    sizes = f"{len(group.rows):,} \N{MULTIPLICATION SIGN} {format_bytes(group.size // len(group.rows))}"
    return [
        html.Details(
            [html.Summary(f"{sizes} like this one: {group.title}"), html.P([*buttons, more], className="alike")]
        )
    ]


def _operator(rank: Rank, op_id: int) -> str:
    history = rank.history
    module = rank.module_title(int(history.module[op_id]))
    phase = history.phases[history.phase[op_id]] or "other"
    return (
        f"{rank.op_names[op_id]} (operator {op_id:,}, {phase} of step {history.step[op_id]}{module and f', {module}'})"
    )


def _why(rank: Rank, row: int, category: str) -> str:
    """Returns what keeps a storage alive."""
    saved = rank.trace.table(Saved)
    uses = np.flatnonzero(saved.storage_id == row)
    if len(uses):
        last = int(saved.released_op_id[uses].max())
        maker = _operator(rank, int(saved.forward_op_id[uses[0]]))
        until = f" until {_operator(rank, last)}" if last != NONE else ""
        more = f" and {len(uses) - 1} more" if len(uses) > 1 else ""
        return f"saved for the backward of {maker}{more}{until}"
    return {
        "parameter": "parameter: alive as long as the model",
        "buffer": "buffer: alive as long as the model",
        "optimizer_state": "optimizer state: alive as long as the optimizer",
        "gradient": "gradient: alive until zero_grad sets it to None",
        "input": "input: the script references the batch, or a tensor derived from it",
    }.get(category, "still referenced: by the script, or for a later operator")


def _stack(rank: Rank, op_id: int, editor: str) -> list[Any]:
    if op_id == NONE:
        return []
    stack = int(rank.op_stacks[op_id])
    if stack == NONE:
        return [parts.note("No Python stack was captured.")]
    own = {f"{line.file}:{line.line}:{line.function}" for line in rank.sources.user_frames[stack]}
    frames = str(rank.stacks.frames[stack]).splitlines()[:_MOST_FRAMES]
    is_folded = len(own) < len(frames)
    items: list[Any] = []
    hidden: list[str] = []
    for frame in [*frames, None]:
        if frame is not None and is_folded and frame not in own:
            hidden.append(frame)
            continue
        if hidden:
            folded = html.Ol([html.Li(parts.name(one, 140)) for one in hidden])
            count = f"{len(hidden)} frame{'s' if len(hidden) > 1 else ''} of torch and libraries"
            items.append(html.Li(html.Details([html.Summary(count), folded])))
            hidden = []
        if frame is not None:
            items.append(html.Li(_own_frame(rank, stack, frame, editor), className="own"))
    text: Any = {"data-copy": "\n".join(frames)}
    copy = html.Button("copy", type="button", title="copy the stack", className="quiet", **text)
    return [html.H4(["Python stack, innermost first ", copy]), html.Ol(items, className="stack")]


def _own_frame(rank: Rank, stack: int, frame: str, editor: str) -> list[Any]:
    """Returns a frame of the user's code, with its source line where the file is on this machine."""
    lines = rank.sources.user_frames[stack]
    line = next((one for one in lines if f"{one.file}:{one.line}:{one.function}" == frame), None)
    if line is None:
        return [parts.name(frame, 140)]
    text = source_text(line.file, line.line)
    place = html.Span(parts.name(f"{line.place} {line.function}", 140), title=frame[:1000])
    link = link_to(editor, line.file, line.line)
    opened = [html.A("open", href=link, title="open this line in your editor", className="open")] if link else []
    return [place, *opened, html.Code(text[:160])] if text else [place, *opened]


def link_to(address: str, file: str, number: int) -> str:
    """Returns the address that opens a line of a file that is on this machine; "" where there is none."""
    if not address or not _is_source(file):
        return ""
    return address.replace("{file}", quote(file)).replace("{line}", str(number))


def source_text(file: str, number: int) -> str:
    """Returns a line of a Python file on this machine, stripped; "" where there is none."""
    if not _is_source(file):
        return ""
    linecache.checkcache(file)
    return linecache.getline(file, number).strip()


def _is_source(file: str) -> bool:
    return Path(file).is_absolute() and is_source_file(file)
