"""`memprof diff --allocations`: what a real device allocated beside what a dry run does, allocation by allocation."""

from __future__ import annotations

import importlib
import json
import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from memprof.analysis.compared.comparison import AllocationComparison
from memprof.analysis.compared.comparison_words import DIFFERENCES, sides, verdict
from memprof.analysis.table import FactTable
from memprof.cli.page import Page
from memprof.errors import UsageError
from memprof.harmless import notify
from memprof.trace.schema import Ints
from memprof.units import format_bytes

if TYPE_CHECKING:
    from memprof.analysis.compared.allocation_sequence import AllocationSequence


def compare_allocations(
    snapshot: str,
    rest: Sequence[str],
    *,
    machine: str | None,
    tolerance: str,
    rows: int,
    figure: str | None,
    in_dashboard: bool,
    form: str,
) -> int:
    """Prints a comparison of a real GPU's allocations with a dry run's, and returns the exit code.

    Args:
        snapshot: What the job wrote on a GPU.
        rest: A snapshot or a recording; with a device the job's script and its arguments.
        machine: The GPU to simulate; None where both files exist.
        tolerance: Largest error of the peak, a percentage.
        rows: Kinds of differences to list at most.
        figure: SVG file to draw both sides' live bytes to; None for none.
        in_dashboard: Show both sides in a browser.
        form: text, json, or markdown: one row of the table in docs/how-true.md.

    Raises:
        BadInputError: A file cannot be read, or has no history.
        UsageError: There is nothing to compare with, or the figure cannot be written.
    """
    share = _share(tolerance)
    rest = rest[1:] if rest[:1] == ("--",) else rest
    if not rest:
        raise UsageError(
            f"nothing to compare the allocations of {snapshot} with: name another snapshot, or add --device rtx4090 -- "
            "train.py"
        )
    from memprof.analysis.compared.allocation_sequence import read_sequence
    from memprof.analysis.compared.comparison import compare_sequences
    from memprof.errors import GateFailedError

    if find_spec("rapidfuzz") is None:
        raise UsageError("comparing allocations needs rapidfuzz: pip install 'torch-memprof[compare]'")
    if in_dashboard:
        importlib.import_module("memprof_dashboard.command").require_dash()
    real = read_sequence(snapshot)
    with ExitStack() as stack:
        if machine is None:
            if len(rest) > 1 or rest[0].endswith(".py"):
                raise UsageError("to dry-run a script, name the GPU of the snapshot: --device rtx4090.")
            compared = compare_sequences(real, read_sequence(rest[0]))
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="memprof-compare-"))
            compared = _dry_run(real, list(rest), machine, Path(folder))
        _show(compared, machine or "", rows, figure, form)
        if in_dashboard:
            importlib.import_module("memprof_dashboard.command").show_allocations(
                Path(snapshot), Path(compared.dry.source)
            )
    return 0 if compared.peak_is_within(share) else GateFailedError.exit_code


def _show(compared: AllocationComparison, device: str, rows: int, figure: str | None, form: str) -> None:
    if figure is not None:
        from memprof.trace.files.whole_file import whole_file

        real, dry = compared.real, compared.dry
        title = f"Live bytes after each allocation: {compared.equal:,} of {len(real):,} equal"
        marks = [(gap.real_from, gap.real_to) for gap in compared.gaps]
        try:
            with whole_file(Path(figure)) as file:
                file.write(draw_timelines(title, real.live, dry.live, marks).encode())
        except OSError as error:
            raise UsageError(f"--figure {figure} cannot be written ({error.strerror or error}).") from None
    if form == "json":
        from memprof.analysis.compared.comparison_words import comparison_to_json

        print(json.dumps(comparison_to_json(compared), indent=2, allow_nan=False))
    elif form == "markdown":
        print(describe_row(compared, device))
    else:
        show_allocations(compared, rows)


def _share(text: str) -> float:
    """Reads a percentage.

    Raises:
        UsageError: It is none.
    """
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"--tolerance {text!r} is not a percentage from 0% to 100%, such as 0.5%.")
    return share


def _dry_run(real: AllocationSequence, words: list[str], device: str, folder: Path) -> AllocationComparison:
    """Dry-runs the script, which writes its snapshots to a folder, and compares the one of the real run's name."""
    from memprof.analysis.compared.allocation_sequence import read_sequence
    from memprof.analysis.compared.comparison import compare_sequences
    from memprof.launch.dry.dry_outcome import collect_snapshots
    from memprof.launch.parent.target import find_target
    from memprof.machines.card import find_card

    name = find_card(device).machine.name
    is_module = words[0] == "-m"
    target = find_target(tuple(words[1:] if is_module else words), is_module=is_module, is_command=False)
    notify(f"dry-running {target.name} on {name}")
    snapshot = Path(real.source).name
    taken = collect_snapshots(target, name, snapshot, folder)
    named = [path for path in taken if path.name.partition("-")[2] == snapshot]
    compared = [compare_sequences(real, read_sequence(str(path))) for path in named[-1:] or taken]
    return max(compared, key=lambda one: one.equal)


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
    """Returns a comparison as a row of Markdown, without names of files or paths of the user's."""
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
