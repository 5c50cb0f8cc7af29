"""Draws predicted against real peaks, the first figure of docs/how-true.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from memprof.cli.pages.allocations_page import FAINT, GIB, INK, LEFT, RIGHT, WIDTH, legend, line, picture, text_at

#: Colours of counters, which differ for the colour-blind too.
COLORS = {"allocated": "#0b6bcb", "reserved": "#d1620a", "device": "#6b4fa0"}
BAND = "#e2f3e6"
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

    high_y = error_at(2)
    body = [text_at(LEFT, 22, "Peak memory: dry run without a GPU, against the GPU's own counter", size=15, weight=600)]
    ticks = [low * 2**index for index in range(round(span) + 1)]
    bottom = top + height + gap + strip
    for tick in ticks:
        x, y = across(tick * GIB), up(tick * GIB)
        label = f"{tick:g}"
        body += [
            line(x, top, x, top + height, FAINT),
            line(x, top + height + gap, x, bottom, FAINT),
            line(LEFT, y, WIDTH - RIGHT, y, FAINT),
            text_at(LEFT - 8, y + 4, label, anchor="end"),
            text_at(x, bottom + 18, label, anchor="middle"),
        ]
    body += [
        line(across(low * GIB), up(low * GIB), across(high * GIB), up(high * GIB), INK, dash="4 4"),
        text_at(LEFT, top - 10, "dry run, GiB"),
        text_at(WIDTH - RIGHT, bottom + 38, "GPU, GiB", anchor="end"),
        text_at(LEFT, top + height + gap - 10, "error of the dry run, % (band: 2 %)"),
        f'<rect x="{LEFT}" y="{high_y:.1f}" width="{inner}" height="{error_at(-2) - high_y:.1f}" fill="{BAND}"/>',
    ]
    for error in (-EDGE, -10, 0, 10, EDGE):
        y = error_at(error)
        body += [
            line(LEFT, y, WIDTH - RIGHT, y, FAINT),
            text_at(LEFT - 8, y + 4, f"{error:+g}" if error else "0", anchor="end"),
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
    body += legend([(f"{kind} ({sum(one.kind == kind for one in points)})", color) for kind, color in COLORS.items()])
    return picture(body, bottom + 50, "Scatter of predicted against real peaks")
