"""The verdict and key figures of a recording, and the moment at the cursor in a sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from dash import html

from memprof.analysis.allocator.device_verdict import DOES_NOT_FIT, FITS, MAY_NOT_FIT, NO_LIMIT, DeviceVerdict
from memprof.analysis.leaks.leaks import describe_leaks
from memprof.analysis.out_of_memory.out_of_memory_words import whole_step_command
from memprof.analysis.report.notes import describe_steps
from memprof.errors import UsageError
from memprof.machines.budget import parse_budget
from memprof.replay.history import History
from memprof.trace.manifest import RUNNING
from memprof.trace.whole_steps import has_run_out, is_cut_short
from memprof.units import format_bytes, format_us
from memprof_dashboard import parts
from memprof_dashboard.figures.shared import escaped
from memprof_dashboard.markup import shorten
from memprof_dashboard.palette import RECOMPUTED, RECOMPUTED_COLOUR, fill_of, phase_colours
from memprof_dashboard.sources import Rank
from memprof_dashboard.state import View, shown

#: Signs before a verdict; its words say the same.
_ICONS = {FITS: "✓", MAY_NOT_FIT: "!", DOES_NOT_FIT: "✕", NO_LIMIT: "▲"}

#: Operators of the visible range at which the legend looks for categories.
_SAMPLES = 500


def budget_of(text: str, peak_bytes: int) -> int:
    """Parses a budget line; 0 where it is empty or invalid."""
    try:
        return parse_budget(text, peak_bytes) if text.strip() else 0
    except UsageError:
        return 0


def facts_of(rank: Rank, view: View, second: tuple[int, str] | None = None) -> Any:
    """Returns whether it fits, whether it leaks, what most of the peak is, and the buttons to what comes next.

    Args:
        rank: The recording.
        view: The view.
        second: Place and name of the only other open recording, which may be compared with it.
    """
    history = rank.history
    if not history.ops:
        return parts.empty(
            "No operators", f"{rank.trace.path.name} contains no operators: the job ran no step in its window."
        )
    peak_bytes = int(history.total.max())
    device = rank.verdict()
    lines: list[Any] = [] if device.state == NO_LIMIT else [_headline(device)]
    budget = budget_of(view.budget, peak_bytes)
    if budget and view.budget.strip() != device.budget:  # or the line above has said it
        lines.append(_headline(rank.verdict(budget), is_second=bool(lines)))
    elif not budget and view.budget.strip():
        lines.append(html.P([_icon(MAY_NOT_FIT), _mistake(view.budget, peak_bytes)], className="warning", role="alert"))
    is_said = not lines
    if is_said:
        at = history.peak(*rank.step_range(rank.fullest_number()))
        at = at if int(history.total[at]) == peak_bytes else history.peak()
        where = f" in {phase_of(history, at)} of step {history.step[at]}" if rank.has_phases else ""
        sentence = f"Peaks at {format_bytes(peak_bytes)}{where}"
        if rank.is_end_state:
            sentence = f"{format_bytes(peak_bytes)} in use at the end"
        lines = [html.H1([_icon(NO_LIMIT), html.Span(sentence, title=f"{peak_bytes:,} B")])]
    if rank.leaks.growth.is_rise:
        lines.append(html.P([_icon(MAY_NOT_FIT), parts.with_code(describe_leaks(rank.leaks), 300)], className="second"))
    lines.append(html.P(_facts(rank, view, peak_bytes if is_said else -1), className="facts-line"))
    if not rank.trace.manifest.capture.is_complete:
        lines.append(_incomplete(rank, device))
    lines += _lacks(rank)
    buttons = _next(rank, view, device, budget, second)
    return [html.Div(lines, className="verdict-text"), html.Div(buttons, className="next")]


def _headline(verdict: DeviceVerdict, *, is_second: bool = False) -> Any:
    content = [_icon(verdict.state), html.Span(parts.sentence(verdict.sentence, 160), title=verdict.parts or None)]
    kind = f"verdict-{verdict.state}"
    return html.P(content, className=f"second {kind}") if is_second else html.H1(content, className=kind)


def _icon(state: str) -> html.Span:
    hidden: Any = {"aria-hidden": "true"}
    return html.Span(_ICONS[state], className=f"icon {state}", **hidden)


def _mistake(text: str, peak_bytes: int) -> str:
    try:
        parse_budget(text, peak_bytes)
    except UsageError as error:
        return f"Invalid budget: {error}"
    return ""


def _facts(rank: Rank, view: View, said_bytes: int) -> list[Any]:
    """Returns the peak of the visible range, where it is, what most of it is, and how steps differ, on one line.

    Args:
        rank: The recording.
        view: The view.
        said_bytes: The peak that the sentence above has said, with its place; -1 for none.
    """
    history, now, manifest = rank.history, shown(view, rank), rank.trace.manifest
    peak = history.peak(now.first, now.end)
    size = int(history.total[peak])
    split = {name: int(history.alive_bytes(name, np.array([peak]))[0]) for name in history.categories}
    most = max(split, key=lambda name: split[name], default="")
    module = rank.module_title(int(history.module[peak]))
    line = rank.sources.of_stack(int(rank.op_stacks[peak]))
    is_all = (now.first, now.end) == (0, history.ops)
    peak_at: list[Any] = [
        html.Span(
            [
                "allocated peak " if is_all or size == int(history.total.max()) else "peak of the visible range ",
                html.Strong(format_bytes(size)),
            ],
            title=f"{size:,} B",
        ),
        f"step {history.step[peak]}, {phase_of(history, peak)}" if rank.has_phases else "",
    ]
    facts: list[Any] = [
        *(peak_at if size != said_bytes else []),
        *([parts.name(line.place, 50)] if line is not None else [parts.name(module, 50)] if module else []),
        f"{split[most] / size:.0%} {fill_of(most).label}" if size else "",
    ]
    if not rank.leaks.growth.is_rise and (steps := describe_steps(rank.step_peaks())):
        leaks: Any = {"data-go": json.dumps({"tab": "leaks"}), "data-then": "tabs"}
        facts.append(
            html.Button(steps, type="button", className="alarm", title="what stays from step to step", **leaks)
        )
    plain = rank.steps.duration_us[(rank.steps.kind == "plain") & rank.steps.is_complete]
    if len(plain) and np.isfinite(np.nanmedian(plain)):
        facts.append(
            html.Span(f"step {format_us(float(np.nanmedian(plain)))}", title="without the recorder", className="whole")
        )
    device = manifest.machine.device_name or manifest.machine.device_kind
    facts.append(parts.name(device, 40) if device else "")
    if manifest.torch_version:
        facts.append(html.Span(f"torch {manifest.torch_version}", className="whole"))
    return [part for fact in facts if fact for part in (html.Span(" · ", className="dot"), fact)][1:]


def _next(
    rank: Rank, view: View, device: DeviceVerdict, budget: int, second: tuple[int, str] | None
) -> list[html.Button]:
    """Returns the buttons to what comes next: what changed, what leaks, what fits."""
    buttons = []
    is_short = device.state in (DOES_NOT_FIT, MAY_NOT_FIT) or (budget and int(rank.history.total.max()) > budget)
    wanted = view.budget if budget else device.budget or "60%"
    if view.other >= 0:
        buttons.append(_step("What changed", tab="diff"))
    elif second is not None:
        buttons.append(_step(f"Compare with {shorten(second[1], 30)}", tab="diff", other=second[0]))
    if rank.leaks.growth.is_rise:
        buttons.append(_step("What leaks", tab="leaks"))
    if is_cut_short(rank.trace):
        command = _whole_step(rank)
        return [*buttons, *([_copy(command)] if command else [])]
    label = "Find a plan that fits" if is_short else "Make it smaller"
    go = _step(label, title=f"search plans for a budget of {wanted}", tab="whatif", budget=wanted)
    return [*buttons, go]


def _step(label: str, title: str | None = None, **fields: Any) -> html.Button:
    then: Any = {"data-go": json.dumps(fields), "data-then": "whatif-search" if "budget" in fields else "tabs"}
    return html.Button(f"{label} →", type="button", title=title, className="main", **then)


def _copy(command: str) -> html.Button:
    copied: Any = {"data-copy": command}
    return html.Button("Copy the command for a whole step", type="button", title=command, className="main", **copied)


def _incomplete(rank: Rank, device: DeviceVerdict) -> Any:
    capture = rank.trace.manifest.capture
    if capture.reason == RUNNING:
        return parts.note(f"Recorded up to {capture.ends_at or 'here'}: {RUNNING}.")
    ends = f"ended early in {capture.ends_at}" if capture.ends_at else "is incomplete"
    sentences = [f"This recording {ends}: {capture.reason or 'the file is truncated'}."]
    if device.state == DOES_NOT_FIT and device.parts:
        sentences.append(device.parts)
    if command := _whole_step(rank):
        sentences.append("Plans need a whole step, which a dry run records, since its memory does not run out:")
        return html.Div([parts.note(" ".join(sentences)), parts.command(command)])
    return parts.note(" ".join(sentences))


def _whole_step(rank: Rank) -> str:
    """Returns the command that records a whole step where memory ran out before one was complete; "" elsewhere."""
    failed = has_run_out(rank.trace) and is_cut_short(rank.trace)
    return whole_step_command(rank.trace.manifest)[0] if failed else ""


def _lacks(rank: Rank) -> list[Any]:
    """Returns what an imported file does not contain, folded; nothing of a recording."""
    manifest = rank.trace.manifest
    if manifest.command or not manifest.backend.blind_spots:
        return []
    texts = (*manifest.backend.blind_spots, *manifest.notes)
    items = html.Ul([html.Li(parts.name(text, 600)) for text in texts])
    title = f"Imported ({manifest.backend.name.replace('-', ' ')}): what it does not contain"
    return [html.Details([html.Summary(title), items], className="lacks")]


def phase_of(history: History, op_id: int) -> str:
    """Returns an operator's phase in words."""
    phase = history.phases[history.phase[op_id]] or "other"
    return f"{RECOMPUTED} in {phase}" if history.runs_again[op_id] else phase


def readout(rank: Rank, view: View) -> Any:
    """Returns a description of the operator at the cursor."""
    history = rank.history
    if not history.ops:
        return ""
    at = shown(view, rank).at
    if rank.is_end_state:
        return [html.Strong(format_bytes(int(history.total[at]))), " in use at the end; no history was recorded"]
    module = rank.module_title(int(history.module[at]))
    stack = int(rank.op_stacks[at])
    line = rank.sources.of_stack(stack)
    return [
        html.Strong(format_bytes(int(history.total[at]))),
        f" during operator {at:,}: ",
        parts.name(str(rank.op_names[at])),
        f", {phase_of(history, at)} of step {history.step[at]}" if rank.has_phases else "",
        *([", in ", parts.name(module)] if module else []),
        *([", ", parts.name(line.place)] if line is not None else []),
    ]


def hover_text(rank: Rank, op_id: int) -> str:
    """Returns what the timeline's hover says of an operator: its name, module and line, as markup."""
    history = rank.history
    module = rank.module_title(int(history.module[op_id]))
    line = rank.sources.of_stack(int(rank.op_stacks[op_id]))
    texts = [str(rank.op_names[op_id]).removesuffix(".default"), module, "" if line is None else line.place]
    return " · ".join(escaped(text, 28) for text in texts if text)


def legend(stretches: Sequence[tuple[History, int, int]], held: Mapping[str, int], *, has_phases: bool) -> Any:
    """Returns the categories and phases of what the timelines show, with their colours.

    Args:
        stretches: Each recording, the first operator that is shown of it, and the end.
        held: Bytes of each category at the cursor in the first; a click on one hides its area.
        has_phases: Whether phases were recorded.
    """
    fills: dict[str, html.Button] = {}
    phases: dict[str, str] = {}
    is_recomputed = False
    for history, first, end in stretches:
        some = np.unique(np.linspace(first, max(end - 1, first), _SAMPLES).astype(np.int64))
        for name in history.categories:
            if held.get(name) or history.alive_bytes(name, some).any():
                fills.setdefault(name, _category(name, held.get(name, 0)))
        shown_phases = {history.phases[code] or "other" for code in np.unique(history.phase[first:end]).tolist()}
        colours = phase_colours(history.phases)
        phases |= {name: colour for name, colour in colours.items() if name in shown_phases}
        is_recomputed |= bool(history.runs_again[first:end].any())
    if is_recomputed:
        phases[RECOMPUTED] = RECOMPUTED_COLOUR
    rows = [html.Div(list(fills.values()), className="keys")]
    keys = [html.Span([_swatch(colour), parts.name(name, 30)], className="key") for name, colour in phases.items()]
    return [*rows, html.Div([html.Span("phases", className="soft"), *keys], className="keys")] if has_phases else rows


def _category(name: str, held: int) -> html.Button:
    fill = fill_of(name)
    pressed: Any = {"aria-pressed": "true", "data-area": escaped(fill.label)}
    content = [_swatch(fill.colour), parts.name(fill.label, 30), html.Span(format_bytes(held), className="held")]
    return html.Button(content, type="button", className="key", title="show or hide", **pressed)


def _swatch(colour: str) -> html.Span:
    return html.Span(className="swatch", style={"background": colour})
