"""The diagrams of the documentation as SVG, in the colours of the dashboard; light or dark as the reader's system."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from lab.pictures.badges import BADGES
from memprof_dashboard.palette import FILLS, PHASE_COLOURS, THEMES, ink_on

FOLDER = "docs/assets/diagrams"
_LIGHT, _DARK = THEMES["light"], THEMES["dark"]
_STYLE = f"""<style>
:root{{--ink:{_LIGHT.ink};--paper:{_LIGHT.paper};--faint:{_LIGHT.faint};--accent:{_LIGHT.accent};--alarm:{_LIGHT.alarm}}}
@media (prefers-color-scheme:dark){{:root{{--ink:{_DARK.ink};--paper:{_DARK.paper};--faint:{_DARK.faint};\
--accent:{_DARK.accent};--alarm:{_DARK.alarm}}}}}
text{{font:14px system-ui,sans-serif;fill:var(--ink)}}
.small{{font-size:12px}}.bold{{font-weight:650}}.mid{{text-anchor:middle}}.end{{text-anchor:end}}
.mono{{font:13px ui-monospace,Menlo,Consolas,monospace}}
.box{{fill:none;stroke:var(--ink);stroke-width:1.25}}.line{{stroke:var(--ink);stroke-width:1.25;fill:none}}
.faint{{stroke:var(--faint);fill:none}}.accent{{stroke:var(--accent);stroke-width:2;fill:none}}
.alarm{{stroke:var(--alarm);stroke-width:1.5;stroke-dasharray:6 4;fill:none}}.alarmed{{fill:var(--alarm)}}
.accented{{fill:var(--accent)}}
</style>
<marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto-start-reverse">\
<path d="M0 0 8 4 0 8z" fill="var(--ink)"/></marker>"""
_ACTIVATION, _PARAMETER = FILLS["activation"].colour, FILLS["parameter"].colour
_OPTIMIZER, _GRADIENT = FILLS["optimizer_state"].colour, FILLS["gradient"].colour


def _svg(title: str, width: int, height: int, *parts: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    back = f'<rect width="{width}" height="{height}" rx="8" fill="var(--paper)"/>'
    return "\n".join([head, f"<title>{html.escape(title)}</title>", _STYLE, back, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, kind: str = "", style: str = "") -> str:
    looks = (f' class="{kind}"' if kind else "") + (f' style="{style}"' if style else "")
    return f'<text x="{x:g}" y="{y:g}"{looks}>{html.escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, fill: str = "", kind: str = "", radius: int = 0) -> str:
    looks = (f' fill="{fill}"' if fill else "") + (f' class="{kind}"' if kind else "")
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}"{looks}/>'


def _path(points: Sequence[tuple[float, float]], kind: str = "line", fill: str = "", arrow: bool = False) -> str:
    d = "M" + " ".join(f"{x:g} {y:g}" for x, y in points) + ("z" if fill else "")
    looks = f' fill="{fill}"' if fill else f' class="{kind}"'
    return f'<path d="{d}"{looks}{" marker-end=" + chr(34) + "url(#to)" + chr(34) if arrow else ""}/>'


def loop() -> str:
    """The loop: record, suggest, apply, verify."""
    steps = (
        ("record", "memprof record", "what is allocated, when,", "and what keeps it alive"),
        ("suggest", "memprof suggest", "replay plans on the", "recording, keep the fastest"),
        ("apply", "record --plan", "train the unmodified", "script under the plan"),
        ("verify", "memprof verify", "measured against", "predicted, to the byte"),
    )
    parts = []
    for place, (name, command, one, two) in enumerate(steps):
        x = 24 + 208 * place
        parts += [
            _rect(x, 24, 176, 118, kind="box", radius=10),
            _text(x + 88, 52, name, "mid bold accented"),
            _text(x + 88, 76, command, "mid mono"),
            _text(x + 88, 104, one, "mid small"),
            _text(x + 88, 122, two, "mid small"),
        ]
        if place:
            parts.append(_path([(x - 30, 83), (x - 4, 83)], arrow=True))
    back = [(736, 142), (736, 172), (112, 172), (112, 146)]
    parts += [_path(back, arrow=True), _text(424, 192, "another batch size, model or budget", "mid small")]
    return _svg("The loop: record, suggest, apply, verify", 848, 208, *parts)


def step() -> str:
    """The memory of one training step."""
    left, right, base = 60.0, 640.0, 280.0
    forward, backward = 260.0, 500.0
    held = ((_PARAMETER, 34), (_OPTIMIZER, 68))
    parts = []
    low = base
    for colour, height in held:
        parts.append(_rect(left, low - height, right - left, height, fill=colour))
        low -= height
    grown = low - 30
    parts.append(_path([(forward, low), (backward, grown), (right, grown), (right, low)], fill=_GRADIENT))
    parts.append(_path([(left, low), (forward, low - 118), (backward, grown), (forward, low)], fill=_ACTIVATION))
    parts += [
        _path([(left, 24), (left, base), (right, base)]),
        _text(forward, low - 142, "peak: the last activation is made,", "mid small bold"),
        _text(forward, low - 127, "the first is not freed yet", "mid small bold"),
        _text(652, base - 12, "parameters", "small"),
        _text(652, base - 62, "optimizer state", "small"),
        _text(652, base - 112, "gradients", "small"),
        _text(270, low - 40, "activations", "mid", f"fill:{ink_on(_ACTIVATION)}"),
    ]
    edges = (("forward", left, forward), ("backward", forward, backward), ("optimizer", backward, right))
    for name, low_edge, high_edge in edges:
        colour = PHASE_COLOURS[name]
        parts.append(_rect(low_edge, base + 8, high_edge - low_edge - 2, 22, fill=colour))
        parts.append(_text((low_edge + high_edge) / 2, base + 24, name, "mid small", f"fill:{ink_on(colour)}"))
    return _svg("Memory over one training step", 760, 326, *parts)


def counters() -> str:
    """Allocated, active, reserved and used bytes: each holds the one before."""
    rows = (
        ("used on the device", 640, "what nvidia-smi shows: all processes, contexts, libraries"),
        ("reserved", 500, "segments that torch's allocator holds"),
        ("active", 360, "in use, or freed while another stream may still read it"),
        ("allocated", 320, "tensors, rounded up: the memory of a plan"),
    )
    parts = []
    for place, (name, width, about) in enumerate(rows):
        y = 24 + 56 * place
        parts += [
            _rect(24, y, width, 26, fill="var(--faint)", radius=4),
            _rect(24, y, 320, 26, fill=_ACTIVATION, radius=4),
            _text(34, y + 18, name, "bold", f"fill:{ink_on(_ACTIVATION)}"),
            _text(24, y + 44, about, "small"),
        ]
    parts += [_path([(724, 14), (724, 238)], "alarm"), _text(718, 252, "memory of the device", "end small alarmed")]
    return _svg("Allocated, active, reserved and used bytes", 760, 264, *parts)


def checkpoint() -> str:
    """How activation checkpointing moves the peak."""
    base, left, right, top = 230.0, 56.0, 640.0, 40.0
    plain = [(left, base), (300.0, top), (right - 90, base)]
    kept = [(left + 60.0 * place, base - 16.0 * place) for place in range(5)]
    again: list[tuple[float, float]] = []
    x, y = 300.0, base - 64.0
    for _ in range(4):
        again += [(x + 30, y - 46), (x + 85, y - 16 + 32)]
        x, y = x + 85, y + 16
    lower = [*kept, (300.0, base - 64.0), *again]
    parts = [
        _path([(left, 24), (left, base), (right + 20, base)]),
        _path(plain, "line"),
        _path(lower, "accent"),
        _text(308, top - 6, "without: every layer's activations are kept", "small"),
        _text(452, base - 108, "with: recomputed layer by layer", "small accented"),
        _text((left + 300) / 2, base + 22, "forward", "mid small"),
        _text((300 + right) / 2, base + 22, "backward, with recompute", "mid small"),
        _path([(300, base), (300, base + 6)]),
    ]
    return _svg("Activation checkpointing lowers and moves the peak", 700, 266, *parts)


def ring() -> str:
    """Reduce-scatter and all-gather around a ring of four ranks."""
    colours = (_PARAMETER, _ACTIVATION, _GRADIENT, FILLS["input"].colour)
    parts = []
    for side, (title, about) in enumerate(
        (
            ("reduce-scatter", "each rank ends with the sum of one quarter"),
            ("all-gather", "each rank ends with all four quarters"),
        )
    ):
        left = 24 + 376 * side
        parts += [_text(left + 168, 28, title, "mid bold"), _text(left + 168, 266, about, "mid small")]
        centres = [(left + 60, 84), (left + 276, 84), (left + 276, 190), (left + 60, 190)]
        for rank, (x, y) in enumerate(centres):
            parts += [
                _rect(x - 52, y - 26, 104, 52, kind="box", radius=8),
                _text(x, y - 8, f"rank {rank}", "mid small"),
            ]
            for quarter, colour in enumerate(colours):
                is_there = quarter == rank or side == 1
                at = x - 40 + 20 * quarter
                parts.append(_rect(at, y, 18, 16, fill=colour if is_there else "var(--faint)", radius=2))
        (a, b), (c, d), (e, f), (g, h) = centres
        for start, end in (
            ((a + 56, b), (c - 56, d)),
            ((c, d + 30), (e, f - 30)),
            ((e - 56, f), (g + 56, h)),
            ((g, h - 30), (a, b + 30)),
        ):
            parts.append(_path([start, end], arrow=True))
        parts.append(_text(left + 168, 142, "3 rounds, a quarter each", "mid small"))
    return _svg("Collectives around a ring of four ranks", 760, 284, *parts)


DIAGRAMS = {"loop": loop, "step": step, "counters": counters, "checkpoint": checkpoint, "ring": ring, **BADGES}


def write_diagrams(root: Path) -> list[Path]:
    """Writes all diagrams below the root of the repository, and returns their paths."""
    paths = []
    for name, draw in DIAGRAMS.items():
        path = root / FOLDER / f"{name}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(draw(), encoding="utf-8")
        paths.append(path)
    return paths
