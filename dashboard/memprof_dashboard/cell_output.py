"""A recording's timeline as the output of a notebook's cell: interactive, and a still picture where nothing runs."""

from __future__ import annotations

import html
import importlib.util
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memprof.errors import MemprofError, UsageError
from memprof.replay.history import History
from memprof.trace.schema import Ints
from memprof.trace.store import Trace
from memprof.units import format_bytes
from memprof_dashboard.figures.shared import draw, merged
from memprof_dashboard.palette import THEMES, fill_of

#: Size of the picture, and where the chart is in it, in pixels.
WIDTH, HEIGHT = 900, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 12, 44, 282
#: Columns drawn: a step of two pixels is seen as well as one, and the file is half as large.
_COLUMNS = 400
_INK, _FAINT, _PAPER = THEMES["light"].ink, THEMES["light"].faint, THEMES["light"].paper

_Point = tuple[float, float]


@dataclass(frozen=True)
class _Area:
    colour: str
    points: tuple[_Point, ...]


@dataclass(frozen=True)
class _Line:
    colour: str
    points: tuple[_Point, ...]


@dataclass(frozen=True)
class _Text:
    text: str
    at: _Point
    anchor: str = "start"


@dataclass(frozen=True)
class Still:
    """A picture in shapes, drawn in order on white.

    Attributes:
        title: What it shows, for those who do not see it.
        shapes: Areas, lines and texts.
    """

    title: str
    shapes: tuple[_Area | _Line | _Text, ...]

    def to_svg(self) -> str:
        """Returns the picture as an SVG document, with every text escaped."""
        parts = [_element(shape) for shape in self.shapes]
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            f'role="img" font-family="sans-serif" font-size="12">\n<title>{html.escape(self.title)}</title>\n'
            f'<rect width="100%" height="100%" fill="{_PAPER}"/>\n' + "\n".join(parts) + "\n</svg>\n"
        )

    def to_png(self) -> bytes:
        """Returns the picture as a PNG file.

        Raises:
            UsageError: Pillow is not installed.
        """
        try:
            from PIL import Image, ImageDraw, ImageFont
        except ImportError:
            raise UsageError("a PNG needs Pillow: pip install pillow.") from None
        image = Image.new("RGB", (WIDTH, HEIGHT), _PAPER)
        drawing, font = ImageDraw.Draw(image), ImageFont.load_default(12)
        anchors = {"start": "ls", "middle": "ms", "end": "rs"}
        for shape in self.shapes:
            if isinstance(shape, _Text):
                drawing.text(shape.at, shape.text, fill=_INK, font=font, anchor=anchors[shape.anchor])
            elif isinstance(shape, _Area):
                drawing.polygon(shape.points, fill=shape.colour)
            else:
                drawing.line(shape.points, fill=shape.colour, width=1)
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()


def still_timeline(history: History, title: str) -> Still:
    """Draws the live bytes of a recording, stacked by category, with its peak marked.

    Returns:
        The picture; its highest point is the true peak.
    """
    drawn = draw(history.total, 0, len(history.total), _COLUMNS)
    total = history.total[drawn.op_ids]
    most = max(int(total.max(initial=0)), 1)
    edges = np.append(drawn.left, drawn.end) / max(drawn.end, 1)
    across = _LEFT + (WIDTH - _LEFT - _RIGHT) * edges
    shapes: list[_Area | _Line | _Text] = [_Text(title, (_LEFT, 16))]
    for share in (0.0, 0.5, 1.0):
        y = _height(share)
        shapes.append(_Line(_FAINT, ((_LEFT, y), (WIDTH - _RIGHT, y))))
        shapes.append(_Text(format_bytes(int(share * most)), (_LEFT - 8, y + 4), "end"))
    below: Ints = np.zeros(len(total), dtype=np.int64)
    named: list[tuple[str, str]] = []
    for category in history.categories:
        alive = history.alive_bytes(category, drawn.op_ids)
        if alive.any():
            above = below + alive
            points = (*_stairs(across, above / most), *_stairs(across, below / most)[::-1])
            shapes.append(_Area(fill_of(category).colour, points))
            named.append((fill_of(category).label, fill_of(category).colour))
            below = above
    shapes.append(_Line(_INK, _stairs(across, total / most)))
    at = int(total.argmax()) if len(total) else 0
    middle = float(across[at])
    anchor = "start" if middle < WIDTH / 3 else "end" if middle > 2 * WIDTH / 3 else "middle"
    shapes.append(_Text(f"peak {format_bytes(most)}", (middle, _TOP - 6), anchor))
    return Still(title, (*shapes, *_legend(named)))


def _height(share: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * share


def _stairs(across: np.ndarray, shares: np.ndarray) -> tuple[_Point, ...]:
    """Returns the outline of columns of these heights, from left to right."""
    x = np.repeat(across, 2)[1:-1]
    y = np.repeat(_height(1) + (_BOTTOM - _TOP) * (1 - shares), 2)
    return tuple(zip(x.tolist(), y.tolist(), strict=True))


def _legend(named: Sequence[tuple[str, str]]) -> list[_Area | _Line | _Text]:
    x, y, shapes = float(_LEFT), HEIGHT - 14.0, list[_Area | _Line | _Text]()
    for label, colour in named:
        shapes.append(_Area(colour, ((x, y - 9), (x + 10, y - 9), (x + 10, y + 1), (x, y + 1))))
        shapes.append(_Text(label, (x + 14, y)))
        x += 30 + 7 * len(label)
    return shapes


def _element(shape: _Area | _Line | _Text) -> str:
    if isinstance(shape, _Text):
        (x, y), anchor = shape.at, shape.anchor
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{_INK}">{html.escape(shape.text)}</text>'
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
    if isinstance(shape, _Area):
        return f'<polygon points="{points}" fill="{shape.colour}"/>'
    return f'<polyline points="{points}" fill="none" stroke="{shape.colour}"/>'


#: Height of the interactive figure, in pixels.
_HEIGHT = 420


def cell_output(path: Path) -> dict[str, Any]:
    """Returns a timeline in the forms that front ends choose from, by MIME type.

    JupyterLab, Notebook and VS Code draw plotly's form; where no JavaScript runs (GitHub, an exported page), the SVG is
    shown, which is also all there is without plotly.

    Raises:
        BadInputError: It is missing or damaged, or contains no operators.
    """
    history = History(Trace.open(path))
    title = f"{path.name}: live bytes by category, operator by operator"
    forms: dict[str, Any] = {"text/plain": title, "image/svg+xml": still_timeline(history, title).to_svg()}
    if importlib.util.find_spec("plotly") is not None:
        from memprof_dashboard.figures.timeline import timeline

        figure = timeline(history, 0, len(history.total), THEMES["light"])
        figure.layout = merged(figure.layout, {"height": _HEIGHT, "paper_bgcolor": "#ffffff", "margin": {"t": 60}})
        forms["application/vnd.plotly.v1+json"] = figure.to_plotly_json()
    return forms


def main(arguments: list[str]) -> int:
    """Prints the forms of one recording as JSON; returns the exit code."""
    try:
        print(json.dumps(cell_output(Path(arguments[0]))))
    except MemprofError as error:
        print(f"memprof: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
