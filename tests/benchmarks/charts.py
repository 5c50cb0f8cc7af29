"""Draws the figures of docs/how-true.md as SVG: predicted against real peaks, and a run's live bytes on both sides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from memprof.trace.schema import Ints

GIB = 1 << 30

WIDTH, LEFT, RIGHT = 760, 64, 16
#: Colours that differ for the colour-blind too, and on white.
COLORS = {"allocated": "#0b6bcb", "reserved": "#d1620a", "device": "#6b4fa0"}
REAL, DRY, OFF, INK, FAINT, BAND = "#9aa4b2", "#0b6bcb", "#d1242f", "#1f2328", "#d8dee4", "#e2f3e6"
#: Errors beyond these per cent are drawn at the edge.
EDGE = 20.0


@dataclass(frozen=True)
class Point:
    """A job whose peak is known.

    Attributes:
        name: Of the job.
        kind: Of the counter: allocated, reserved or device.
        real_bytes: Peak on the GPU.
        dry_bytes: Peak of the dry run.
    """

    name: str
    kind: str
    real_bytes: int
    dry_bytes: int

    @property
    def error(self) -> float:
        """By how many per cent the dry run is higher."""
        return 100 * (self.dry_bytes / self.real_bytes - 1)


def draw_scatter(points: Sequence[Point]) -> str:
    """Draws predicted against real peaks, and below each the error, by the size of the job.

    Args:
        points: One for each peak.

    Returns:
        The text of an SVG file.
    """
    low = 2.0 ** math.floor(math.log2(min(min(one.real_bytes, one.dry_bytes) for one in points) / GIB))
    high = 2.0 ** math.ceil(math.log2(max(max(one.real_bytes, one.dry_bytes) for one in points) / GIB))
    span = math.log2(high / low)
    inner = WIDTH - LEFT - RIGHT
    top, height, gap, strip = 56, 430, 58, 190

    def across(size: float) -> float:
        return LEFT + inner * math.log2(size / GIB / low) / span

    def up(size: float) -> float:
        return top + height - height * math.log2(size / GIB / low) / span

    def error_at(error: float) -> float:
        return top + height + gap + strip / 2 - strip / 2 * max(-EDGE, min(EDGE, error)) / EDGE

    body = [_text(LEFT, 22, "Peak memory: dry run without a GPU, against the GPU's own counter", size=15, weight=600)]
    ticks = [low * 2**index for index in range(round(span) + 1)]
    bottom = top + height + gap + strip
    for tick in ticks:
        x, y = across(tick * GIB), up(tick * GIB)
        label = f"{tick:g}"
        body += [
            _line(x, top, x, top + height, FAINT),
            _line(x, top + height + gap, x, bottom, FAINT),
            _line(LEFT, y, WIDTH - RIGHT, y, FAINT),
            _text(LEFT - 8, y + 4, label, anchor="end"),
            _text(x, bottom + 18, label, anchor="middle"),
        ]
    body += [
        _line(across(low * GIB), up(low * GIB), across(high * GIB), up(high * GIB), INK, dash="4 4"),
        _text(LEFT, top - 10, "dry run, GiB"),
        _text(WIDTH - RIGHT, bottom + 38, "GPU, GiB", anchor="end"),
        _text(LEFT, top + height + gap - 10, "error of the dry run, % (band: 2 %)"),
        f'<rect x="{LEFT}" y="{error_at(2):.1f}" width="{inner}" height="{error_at(-2) - error_at(2):.1f}" fill="{BAND}"/>',
    ]
    for error in (-EDGE, -10, 0, 10, EDGE):
        y = error_at(error)
        body += [
            _line(LEFT, y, WIDTH - RIGHT, y, FAINT),
            _text(LEFT - 8, y + 4, f"{error:+g}" if error else "0", anchor="end"),
        ]
    for kind, color in COLORS.items():
        chosen = [one for one in points if one.kind == kind]
        for one in chosen:
            title = f"<title>{escape(one.name)}: {one.error:+.2f} %</title>"
            x = across(one.real_bytes)
            for y in (up(one.dry_bytes), error_at(one.error)):
                body.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}" fill-opacity="0.65" stroke="#fff" '
                    f'stroke-width="0.8">{title}</circle>'
                )
    body += _legend([(f"{kind} ({sum(one.kind == kind for one in points)})", color) for kind, color in COLORS.items()])
    return _svg(body, bottom + 50, "Scatter of predicted against real peaks")


def draw_timelines(title: str, real: Ints, dry: Ints, differs: Sequence[tuple[int, int]]) -> str:
    """Draws the live bytes of both sides over each other.

    Args:
        title: Of the figure.
        real: Live bytes after each allocation of the GPU, shape ``(allocations,)``.
        dry: The same of the dry run, with its own number of allocations.
        differs: Where the sequences differ: first allocation of the GPU, and one past the last.

    Returns:
        The text of an SVG file.
    """
    top, height, inner = 56, 280, WIDTH - LEFT - RIGHT
    most = max(int(real.max()), int(dry.max()))
    step = 2.0 ** math.floor(math.log2(most / GIB / 3))
    count = max(len(real), len(dry))

    def place(index: int, size: float) -> tuple[float, float]:
        return LEFT + inner * index / max(count - 1, 1), top + height - height * size / (1.05 * most)

    def path(live: Ints) -> str:
        points = (place(index, size) for index, size in enumerate(live.tolist()))
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)

    body = [_text(LEFT, 22, title, size=15, weight=600)]
    for index in range(int(1.05 * most / GIB / step) + 1):
        y = place(0, index * step * GIB)[1]
        body += [
            _line(LEFT, y, WIDTH - RIGHT, y, FAINT),
            _text(LEFT - 8, y + 4, f"{index * step:g}", anchor="end"),
        ]
    for first, last in differs:
        x, width = place(first, 0)[0], max(inner * (last - first) / max(count - 1, 1), 2.0)
        body.append(f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{height}" fill="{OFF}" opacity="0.25"/>')
    body += [
        f'<polyline points="{path(real)}" fill="none" stroke="{REAL}" stroke-width="5" stroke-linejoin="round"/>',
        f'<polyline points="{path(dry)}" fill="none" stroke="{DRY}" stroke-width="1.4" stroke-linejoin="round"/>',
        _text(LEFT, top - 10, "live bytes, GiB"),
        _text(WIDTH - RIGHT, top + height + 22, f"allocation, 1 to {count:,}", anchor="end"),
    ]
    body += _legend([("GPU", REAL), ("dry run", DRY), (f"differences ({len(differs)})", OFF)])
    return _svg(body, top + height + 36, title)


def _legend(entries: Sequence[tuple[str, str]]) -> list[str]:
    x, parts = WIDTH - RIGHT, []
    for label, color in reversed(entries):
        x -= 8 * len(label) + 8
        parts += [
            f'<circle cx="{x:.1f}" cy="40" r="5" fill="{color}"/>',
            _text(x + 10, 44, label),
        ]
        x -= 22
    return parts


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{INK}">{escape(text)}</text>'
    )


def _line(x: float, y: float, to_x: float, to_y: float, color: str, dash: str = "") -> str:
    style = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{color}"{style}/>'


def _svg(body: Sequence[str], height: float, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img" font-family="system-ui, -apple-system, Segoe UI, sans-serif">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )
