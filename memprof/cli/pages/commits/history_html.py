"""The chart of `memprof history` as one HTML page, which needs no network and no JavaScript."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from memprof.analysis.commits.history import Measurement, Step
from memprof.analysis.diff.gates import Gate
from memprof.cli.pages.commits.history_page import format_change, format_value, value_of

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 1000, 320, 90, 24, 12

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>memprof history</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 14px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 24px auto; padding: 0 16px; }}
h1 {{ font-size: 20px; }} svg {{ width: 100%; height: auto; }} text {{ font-size: 12px; fill: currentColor; }}
polyline {{ fill: none; stroke: #0969da; stroke-width: 2; }} circle {{ fill: #0969da; }}
circle.changed {{ fill: #d1242f; }} line {{ stroke: #8886; }}
table {{ border-collapse: collapse; }} td, th {{ padding: 2px 14px 2px 0; border-bottom: 1px solid #8886; }}
td {{ overflow-wrap: anywhere; vertical-align: top; }} th {{ text-align: left; }} .number {{ text-align: right; }}
</style></head><body>
<h1>{title}</h1>
{chart}
<table><thead><tr><th>commit</th><th>date</th><th class="number">{name}</th><th class="number">change</th>
<th>subject</th><th>causes, the likeliest first</th></tr></thead><tbody>
{rows}
</tbody></table>
</body></html>
"""


def history_to_html(history: Sequence[Measurement], steps: Sequence[Step], gate: Gate, name: str) -> str:
    """Returns the page: a line over the commits, the changes marked, and a table of them.

    Args:
        history: The measurements, in the order of the commits.
        steps: The changes.
        gate: What is drawn.
        name: Its name.
    """
    known = [one for one in history if not math.isnan(value_of(one, gate))]
    job = history[-1].job
    title = f"{name} of {job.command}{f' on {job.device}' if job.device else ''}, {len(known)} commits"
    return _PAGE.format(
        title=html.escape(title),
        name=html.escape(name),
        chart=_chart(known, {step.after.commit.hash for step in steps}, gate),
        rows="\n".join(_row(step, gate) for step in steps),
    )


def _chart(known: Sequence[Measurement], changed: set[str], gate: Gate) -> str:
    values = [value_of(one, gate) for one in known]
    most = max(values, default=0.0) or 1.0
    wide, high = _WIDTH - _LEFT - 10, _HEIGHT - _BOTTOM - _TOP
    across = [_LEFT + wide * place / max(len(known) - 1, 1) for place in range(len(known))]
    down = [_TOP + high * (1 - value / most) for value in values]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, down, strict=True))
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="The value at each commit">']
    for share in (1.0, 0.5, 0.0):
        y = _TOP + high * (1 - share)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = html.escape(format_value(most * share, gate))
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    parts.append(f'<polyline points="{line}"/>')
    for one, x, y, value in zip(known, across, down, values, strict=True):
        kind = ' class="changed"' if one.commit.hash in changed else ""
        words = f"{one.commit.short} {one.commit.date} {one.commit.subject}: {format_value(value, gate)}"
        parts.append(f'<circle{kind} cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{html.escape(words)}</title></circle>')
    for place, anchor in ((0, "start"), (len(known) - 1, "end")):
        if known:
            commit = known[place].commit
            text = html.escape(f"{commit.short} {commit.date}")
            parts.append(f'<text x="{across[place]:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{text}</text>')
    return "\n".join([*parts, "</svg>"])


def _row(step: Step, gate: Gate) -> str:
    commit = step.after.commit
    causes = "<br>".join(html.escape(cause.sentence) for cause in step.causes[:3])
    numbers = (format_value(step.head, gate), format_change(step, gate))
    return (
        f"<tr><td>{commit.short}</td><td>{html.escape(commit.date)}</td>"
        + "".join(f'<td class="number">{html.escape(text)}</td>' for text in numbers)
        + f"<td>{html.escape(commit.subject)}</td><td>{causes}</td></tr>"
    )
