"""Terminals as SVGs: a session of real commands with a moment to read their output, and what one command prints."""

from __future__ import annotations

import html
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from rich.color import Color
from rich.style import Style
from rich.text import Text

_COLUMNS, _ROWS = 104, 33
_CELL_WIDTH, _CELL_HEIGHT = 8.4, 18
_PAD = 16
#: Seconds: for a letter that is typed, for a line of output, to read a command's output, and at the end.
_LETTER_S, _LINE_S, _READ_S, _END_S = 0.02, 0.05, 2.4, 4.0
_INK, _DIM, _PAPER, _PROMPT = "#d7dde5", "#8b98a8", "#12161c", "#bb9bff"
#: Black, red, green, yellow, blue, magenta, cyan and white of a terminal.
_ANSI = ("#5a6675", "#ff8a80", "#5fd3a6", "#f0c04e", "#6cb2ff", "#d79bf0", "#6fd3e8", "#d7dde5")
#: What hides and shows the cursor.
_MODES = re.compile(r"\x1b\[\?[0-9;]*[hl]")
#: Progress that was written over: on the same line, or after the cursor went up to it; and what moves the cursor.
_ERASED = re.compile(r"[^\n]*\n\r?(?:\x1b\[2K)?\x1b\[1A\r?(?:\x1b\[2K)?")
_OVERWRITTEN = re.compile(r"^.*\r(?!$)|\x1b\[[0-9;?]*[A-HJKSThl]", re.MULTILINE)

COMMANDS = (
    ("memprof record -o run.memprof train.py", "", 3),
    ("memprof suggest run.memprof --budget 60% --allow checkpoint --write plan.toml", "Plans that fit", 0),
    ("memprof record --plan plan.toml -o fits.memprof train.py", "", 6),
    ("memprof verify plan.toml run.memprof fits.memprof", "Live bytes at the peak", 0),
)
#: The command of the still picture, the heading that its output is shown up to, and the columns of its terminal.
REPORT, REPORT_END, REPORT_COLUMNS = "memprof report run.memprof", "Peak of each phase", 92
#: Eighths of a cell that a chart's blocks fill.
_BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class _Line:
    """A line of the session and when it appears, in seconds; a command is typed letter by letter."""

    text: Text
    at: float
    is_typed: bool = False


def record_session(root: Path, folder: Path, path: Path) -> Path:
    """Runs the commands in a terminal and writes what they printed.

    Args:
        root: The repository.
        folder: Where the commands run.
        path: The SVG to write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("run.memprof", "fits.memprof", "plan.toml"):
        (folder / name).unlink(missing_ok=True)
    script = folder / "train.py"
    script.write_bytes((root / "sample_traces" / "gpt" / "train.py").read_bytes())
    lines: list[_Line] = []
    now = 0.6
    for command, end, most in COMMANDS:
        lines.append(_Line(Text.assemble(("$ ", f"bold {_PROMPT}"), (command, "bold")), now, is_typed=True))
        now += len(command) * _LETTER_S + 0.4
        printed = _run(command, folder)
        if end:
            printed = printed[: next((place for place, line in enumerate(printed) if end in line.plain), len(printed))]
        for line in printed[-most:] if most else printed:
            lines += [_Line(part, now) for part in _wrapped(line)]
            now += _LINE_S
        lines.append(_Line(Text(), now))
        now += _READ_S
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_svg(lines, now + _END_S), encoding="utf-8")
    return path


def draw_report(root: Path, folder: Path, path: Path) -> Path:
    """Writes the first tables of the GPT sample's report as a still SVG; arguments as of ``record_session``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.memprof").write_bytes((root / "sample_traces" / "gpt" / "run.memprof").read_bytes())
    printed = _run(REPORT, folder, REPORT_COLUMNS)
    end = next(place for place, line in enumerate(printed) if REPORT_END in line.plain)
    lines = [Text.assemble(("$ ", f"bold {_PROMPT}"), (REPORT, "bold")), *printed[: end - 1]]
    width, height = round(REPORT_COLUMNS * _CELL_WIDTH + 2 * _PAD), len(lines) * _CELL_HEIGHT + 2 * _PAD
    label = "A terminal: memprof report prints the peak, live bytes over the step by phase, and the peak by category"
    rows = []
    for number, line in enumerate(lines):
        top = _PAD + number * _CELL_HEIGHT
        rows += [*_bars(line, top), f'<text y="{top + 0.75 * _CELL_HEIGHT:g}">{_spans(_without_blocks(line))}</text>']
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">',
        f"<style>text{{font:14px ui-monospace,Menlo,Consolas,monospace;fill:{_INK};white-space:pre}}",
        "rect{shape-rendering:crispEdges}</style>",
        f'<rect width="{width}" height="{height}" rx="10" fill="{_PAPER}"/>',
        *rows,
        "</svg>",
        "",
    ]
    path.write_text("\n".join(svg), encoding="utf-8")
    return path


def _bars(line: Text, top: float) -> Iterator[str]:
    """Yields a rectangle for each run of equal blocks of a chart, which fonts would leave gaps between."""
    cells = [(_BLOCKS.find(cell.plain), _hex(_style(cell).color) or _INK) for cell in line.divide(range(1, len(line)))]
    at = 0
    for (eighths, colour), run in groupby(cells):
        count = len(list(run))
        if eighths > 0:
            height = _CELL_HEIGHT * eighths / 8
            yield (
                f'<rect x="{_PAD + at * _CELL_WIDTH:g}" y="{top + _CELL_HEIGHT - height:g}" '
                f'width="{count * _CELL_WIDTH:g}" height="{height:g}" fill="{colour}"/>'
            )
        at += count


def _without_blocks(line: Text) -> Text:
    plain = re.sub(f"[{_BLOCKS}]", " ", line.plain)
    return Text(plain, spans=line.spans)


def _run(command: str, folder: Path, columns: int = _COLUMNS) -> list[Text]:
    """Returns the lines that a command prints in a terminal."""
    main, other = pty.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "LINES": "60", "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    words = [sys.executable, "-m", *command.split()]
    with subprocess.Popen(words, cwd=folder, stdin=other, stdout=other, stderr=other, env=environment) as process:
        os.close(other)
        data = b""
        while True:
            try:
                part = os.read(main, 65536)
            except OSError:  # Linux ends a terminal whose other side was closed so
                break
            if not part:
                break
            data += part
    os.close(main)
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}: {data.decode(errors='replace')[-2000:]}")
    text = _MODES.sub("", data.decode(errors="replace").replace("\r\n", "\n"))
    text = _OVERWRITTEN.sub("", _ERASED.sub("", text))
    return [Text.from_ansi(line) for line in text.rstrip().split("\n")]


def _wrapped(line: Text) -> list[Text]:
    """Cuts a line as a terminal does."""
    return [line[at : at + _COLUMNS] for at in range(0, max(len(line), 1), _COLUMNS)]


def _svg(lines: list[_Line], whole_s: float) -> str:
    width, height = round(_COLUMNS * _CELL_WIDTH + 2 * _PAD), _ROWS * _CELL_HEIGHT + 2 * _PAD
    styles, body = [], []
    for number, line in enumerate(lines):
        y = _PAD + (number + 0.75) * _CELL_HEIGHT
        start = 100 * line.at / whole_s
        styles.append(f"@keyframes l{number}{{0%,{start:.2f}%{{opacity:0}}{start + 0.01:.2f}%,100%{{opacity:1}}}}")
        body.append(f'<g style="animation-name:l{number}"><text y="{y:g}">{_spans(line.text)}</text></g>')
    moves = _moves(lines, whole_s)
    styles.append(f"@keyframes up{{{moves}}}")
    label = (
        "A terminal: the job is recorded, plans for 60 % of its peak are suggested, the job trains under one and fits"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">',
            f"<style>text{{font:14px ui-monospace,Menlo,Consolas,monospace;fill:{_INK};white-space:pre}}",
            f"g g{{animation:{whole_s:g}s steps(1,end) infinite}}",
            f".up{{animation:up {whole_s:g}s steps(1,end) infinite}}",
            *styles,
            # Who wants no movement sees the end.
            "@media (prefers-reduced-motion:reduce){g g{animation:none}.up{animation:none;transform:translateY(END)}}"
            "</style>".replace("END", f"{-_scrolled(len(lines)):g}px"),
            f'<rect width="{width}" height="{height}" rx="10" fill="{_PAPER}"/>',
            f'<clipPath id="c"><rect y="{_PAD - 4}" width="{width}" height="{height - 2 * _PAD + 8}"/></clipPath>',
            '<g clip-path="url(#c)"><g class="up">',
            *body,
            "</g></g></svg>",
            "",
        ]
    )


def _scrolled(count: int) -> float:
    return max(count - _ROWS, 0) * _CELL_HEIGHT


def _moves(lines: list[_Line], whole_s: float) -> str:
    """Returns the keyframes that scroll the session up as lines appear below the last row."""
    moves = ["0%{transform:translateY(0)}"]
    for number, line in enumerate(lines):
        if _scrolled(number + 1):
            moves.append(f"{100 * line.at / whole_s:.2f}%{{transform:translateY({-_scrolled(number + 1):g}px)}}")
    moves.append(f"100%{{transform:translateY({-_scrolled(len(lines)):g}px)}}")
    return "".join(moves)


def _spans(text: Text) -> str:
    """Returns a line as spans, each at its own column: the fonts of readers have different widths."""
    plain = text.plain
    bounds = sorted({0, len(plain), *(edge for span in text.spans for edge in (span.start, span.end))})
    parts = []
    for low, high in pairwise(bounds):
        piece = plain[low:high]
        if not piece.strip():
            continue
        style = _style(text[low:high])
        lead = len(piece) - len(piece.lstrip())
        x = _PAD + (low + lead) * _CELL_WIDTH
        shown = html.escape(piece.strip())
        length = f' textLength="{len(piece.strip()) * _CELL_WIDTH:g}" lengthAdjust="spacingAndGlyphs"'
        parts.append(f'<tspan x="{x:g}"{length}{_look(style)}>{shown}</tspan>')
    return "".join(parts)


def _style(text: Text) -> Style:
    """Returns the style of a text that has one throughout."""
    styles = [span.style for span in text.spans if span.start == 0 and span.end >= len(text)]
    return Style.combine([Style(), *(Style.parse(one) if isinstance(one, str) else one for one in styles)])


def _look(style: Style) -> str:
    colour = _DIM if style.dim else _hex(style.color)
    return (f' fill="{colour}"' if colour else "") + (' font-weight="700"' if style.bold else "")


def _hex(colour: Color | None) -> str:
    if colour is None or colour.is_default:
        return ""
    is_named = colour.number is not None and colour.number < 16
    return _ANSI[(colour.number or 0) % 8] if is_named else colour.get_truecolor().hex
