"""The output of `memprof diff --allocations`: its page, and a picture of the live bytes of both sides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from memprof.analysis.compared.comparison import AllocationComparison
from memprof.analysis.compared.comparison_words import DIFFERENCES, sides, verdict
from memprof.analysis.table import FactTable
from memprof.cli.page import Page
from memprof.trace.schema import Ints
from memprof.units import format_bytes

WIDTH, LEFT, RIGHT = 760, 64, 16
#: Colours that differ for the colour-blind too, and on white.
REAL, DRY, OFF, INK, FAINT = "#9aa4b2", "#0b6bcb", "#d1242f", "#1f2328", "#d8dee4"
GIB = 1 << 30


def show_allocations(compared: AllocationComparison, rows: int) -> None:
    """Prints a comparison."""
    page = Page.for_stdout()
    page.say(verdict(compared), "bold")
    page.add_section("Both sides", sides(compared), "requested bytes, rounded up to 512")
    if compared.differences:
        left_out = len(compared.differences) - rows
        page.add_section(
            "Differences",
            FactTable(DIFFERENCES, compared.differences[:rows]),
            f"{left_out:,} more kinds: --rows {len(compared.differences)}" if left_out > 0 else "",
        )
    page.write()


#: Columns of the table.
COLUMNS = (
    "run",
    "card, torch",
    "allocations of the GPU",
    "equal, in order",
    "more in the dry run",
    "peak of the GPU",
    "error of the peak",
    "of the end",
    "of reserved memory",
)


def describe_row(compared: AllocationComparison, device: str) -> str:
    """Returns a comparison as a row of Markdown, without names of files or paths of the user's.

    Args:
        compared: The two sequences.
        device: The simulated device; "" where both files existed.
    """
    real, dry = compared.real, compared.dry
    error = compared.reserved_error_bytes
    cells = (
        "(what the script does)",
        f"{device or '(card)'}, {real.torch or '(version)'}, dry run with {dry.torch or '(version)'}",
        f"{len(real):,}",
        f"{compared.equal:,}",
        f"{len(dry) - compared.equal:,}",
        format_bytes(real.peak_bytes),
        _error(compared.peak_error_bytes, real.peak_bytes),
        _error(dry.end_bytes - real.end_bytes, real.end_bytes),
        "unknown" if error is None else _error(error, real.peak_reserved_bytes),
    )
    return f"| {' | '.join(cells)} |"


def _error(error: int, real_bytes: int) -> str:
    if not error:
        return "0 B"
    share = f" ({100 * error / real_bytes:+.2f} %)" if real_bytes else ""
    return f"{error:+,} B{share}"


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

    body = [text_at(LEFT, 22, title, size=15, weight=600)]
    for index in range(int(1.05 * most / GIB / step) + 1):
        y = place(0, index * step * GIB)[1]
        body += [
            line(LEFT, y, WIDTH - RIGHT, y, FAINT),
            text_at(LEFT - 8, y + 4, f"{index * step:g}", anchor="end"),
        ]
    for first, last in differs:
        x, width = place(first, 0)[0], max(inner * (last - first) / max(count - 1, 1), 2.0)
        body.append(f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{height}" fill="{OFF}" opacity="0.25"/>')
    body += [
        f'<polyline points="{path(real)}" fill="none" stroke="{REAL}" stroke-width="5" stroke-linejoin="round"/>',
        f'<polyline points="{path(dry)}" fill="none" stroke="{DRY}" stroke-width="1.4" stroke-linejoin="round"/>',
        text_at(LEFT, top - 10, "live bytes, GiB"),
        text_at(WIDTH - RIGHT, top + height + 22, f"allocation, 1 to {count:,}", anchor="end"),
    ]
    body += legend([("GPU", REAL), ("dry run", DRY), (f"differences ({len(differs)})", OFF)])
    return picture(body, top + height + 36, title)


def legend(entries: Sequence[tuple[str, str]]) -> list[str]:
    """Returns names beside dots of their colours, at the right of the line below the title."""
    x, parts = WIDTH - RIGHT, []
    for label, color in reversed(entries):
        x -= 8 * len(label) + 8
        parts += [
            f'<circle cx="{x:.1f}" cy="40" r="5" fill="{color}"/>',
            text_at(x + 10, 44, label),
        ]
        x -= 22
    return parts


def text_at(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", weight: int = 400) -> str:
    """Returns text at a place, in pixels."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{INK}">{escape(text)}</text>'
    )


def line(x: float, y: float, to_x: float, to_y: float, color: str, dash: str = "") -> str:
    """Returns a straight line between two places, in pixels."""
    style = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{color}"{style}/>'


def picture(body: Sequence[str], height: float, title: str) -> str:
    """Returns an SVG file of these elements, WIDTH pixels wide, on white."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" role="img" font-family="system-ui, -apple-system, Segoe UI, sans-serif">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )
