"""Summary of a range of a recording and of the moment at the cursor: key figures, and table rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from dash import html

from memprof.errors import UsageError
from memprof.replay.history import History
from memprof.units import format_bytes, format_us, parse_bytes
from memprof_dashboard import parts
from memprof_dashboard.figures.drawn import draw
from memprof_dashboard.palette import RECOMPUTED, fill_of
from memprof_dashboard.sources import Rank
from memprof_dashboard.state import View
from memprof_dashboard.views.reactions import shown


def budget_of(text: str, peak_bytes: int) -> int:
    """Parses a budget line; 0 where it is empty or invalid."""
    try:
        if text.strip().endswith("%"):
            return int(peak_bytes * float(text.strip().removesuffix("%")) / 100)
        return parse_bytes(text) if text.strip() else 0
    except (UsageError, ValueError, OverflowError):
        return 0


def facts_of(rank: Rank, view: View) -> Any:
    """Returns the key figures: peak, its location, distance to the budget, largest category, missing data."""
    history, manifest = rank.history, rank.trace.manifest
    if not history.ops:
        return parts.empty(
            "No operators", f"{rank.trace.path.name} contains no operators: the job ran no step in its window."
        )
    now = shown(view, rank)
    peak = history.peak(now.first, now.end)
    size = int(history.total[peak])
    split = {name: int(history.alive_bytes(name, np.array([peak]))[0]) for name in history.categories}
    largest = max(split, key=lambda name: split[name])
    facts = [
        _fact("peak", format_bytes(size), f"{size:,} B (visible range)"),
        _fact(
            "where", f"step {history.step[peak]}, {_phase(history, peak)}", rank.module_title(int(history.module[peak]))
        ),
        _fact(
            "largest category",
            f"{fill_of(largest).label} {format_bytes(split[largest])}",
            f"{split[largest] / size:.0%}",
        ),
    ]
    budget = budget_of(view.budget, size)
    if budget:
        over = size - budget
        facts.append(
            _fact("over budget" if over > 0 else "below budget", format_bytes(abs(over)), format_bytes(budget))
        )
    machine = manifest.machine
    if machine.device_kind != "cpu" and machine.capacity_bytes:
        left = machine.capacity_bytes - size
        room = f"{format_bytes(left)} above the peak" if left >= 0 else f"peak is {format_bytes(-left)} over capacity"
        facts.append(_fact("device", format_bytes(machine.capacity_bytes), room))
    plain = rank.steps.duration_us[(rank.steps.kind == "plain") & rank.steps.is_complete]
    if len(plain) and np.isfinite(np.nanmedian(plain)):
        facts.append(_fact("step time", format_us(float(np.nanmedian(plain))), "without the recorder"))
    facts.append(_fact("recorded", machine.device_name or machine.device_kind, f"torch {manifest.torch_version}"))
    remarks = [] if manifest.capture.is_complete else [_incomplete(rank)]
    return [*facts, *remarks]


def _incomplete(rank: Rank) -> Any:
    capture = rank.trace.manifest.capture
    place = f" in {capture.ends_at}" if capture.ends_at else ""
    return parts.note(f"This recording ended early{place}: {capture.reason or 'the file is truncated'}.")


def _fact(label: str, value: str, detail: str) -> html.Div:
    return html.Div(
        [html.Span(label, className="label"), html.Strong(parts.name(value, 40)), html.Span(parts.name(detail, 44))],
        className="fact",
    )


def _phase(history: History, op_id: int) -> str:
    phase = history.phases[history.phase[op_id]] or "other"
    return f"{RECOMPUTED} in {phase}" if history.runs_again[op_id] else phase


def readout(rank: Rank, view: View) -> Any:
    """Returns a description of the operator at the cursor."""
    history = rank.history
    if not history.ops:
        return ""
    at = shown(view, rank).at
    module = rank.module_title(int(history.module[at]))
    stack = int(rank.op_stacks[at])
    line = rank.sources.of_stack(stack)
    return [
        html.Strong(format_bytes(int(history.total[at]))),
        f" during operator {at:,}: ",
        parts.name(str(rank.op_names[at])),
        f", {_phase(history, at)} of step {history.step[at]}",
        *([", in ", parts.name(module)] if module else []),
        *([", ", parts.name(line.place)] if line is not None else []),
    ]


def rows_of(rank: Rank, view: View, most: int | None) -> tuple[list[str], list[list[Any]]]:
    """Returns the timeline's data as rows, limited to the ``most`` highest where it is set."""
    history, now = rank.history, shown(view, rank)
    if not history.ops:
        return ["operator"], []
    op_ids = draw(history.total, now.first, now.end).op_ids
    if most is not None and len(op_ids) > most:
        op_ids = np.sort(op_ids[np.argsort(history.total[op_ids], kind="stable")[-most:]])
    split = [history.alive_bytes(name, op_ids) for name in history.categories]
    heads = [
        ">operator",
        ">step",
        "phase",
        "name",
        ">total bytes",
        *(f">{fill_of(name).label}" for name in history.categories),
    ]
    rows = [
        [
            int(op_id),
            int(history.step[op_id]),
            _phase(history, op_id),
            str(rank.op_names[op_id]),
            int(history.total[op_id]),
            *(int(values[row]) for values in split),
        ]
        for row, op_id in enumerate(op_ids.tolist())
    ]
    return heads, rows
