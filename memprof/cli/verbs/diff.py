"""`memprof diff`: what changed between two recordings, and whether the gates hold."""

from __future__ import annotations

from pathlib import Path

import click

from memprof.cli.options.gate_options import chosen_gates, gate_options
from memprof.cli.pages.diff.diff_output import FORMATS, write_output
from memprof.errors import UsageError


@click.command(
    epilog="""\b
Examples:
  memprof diff base.memprof head.memprof
  memprof diff base.json head.memprof --fail-on 'peak>+2%' --format markdown -o comment.md
  memprof diff base.memprof head.memprof --explain"""
)
@click.argument("base", type=click.Path(), metavar="BASE")
@click.argument("head", type=click.Path(), metavar="HEAD")
@click.option(
    "--base", "bases", multiple=True, type=click.Path(), metavar="TRACE", help="Another recording of the base."
)
@click.option(
    "--head", "heads", multiple=True, type=click.Path(), metavar="TRACE", help="Another recording of the head."
)
@gate_options
@click.option(
    "--ignore",
    multiple=True,
    metavar="WHAT",
    help="Compare although this differs: device, torch, CUDA, batch, 'allocator settings', ...; 'all' for everything.",
)
@click.option("--explain", "explains", is_flag=True, help="Explain in words what changed, and in which modules.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True, help="What to write.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write to this file, replacing it."
)
@click.option("--rows", type=click.IntRange(min=1), default=10, show_default=True, metavar="N", help="Rows of a table.")
def diff(
    base: str,
    head: str,
    bases: tuple[str, ...],
    heads: tuple[str, ...],
    fail_on: tuple[str, ...],
    warn_on: tuple[str, ...],
    ignore: tuple[str, ...],
    explains: bool,
    form: str,
    output: Path | None,
    rows: int,
) -> int:
    """Compare the memory of two recordings: the peak, every phase, and their composition.

    BASE and HEAD are recordings, or the JSON of memprof summary. With several recordings per side, medians are
    compared. The exit code is 4 if a --fail-on gate fails, and 3 if the two are not comparable (another device, torch,
    batch ...).
    """
    fail, warn = chosen_gates(fail_on, warn_on)
    from memprof.analysis.diff.comparison import FRAME, compare, open_side
    from memprof.errors import GateFailedError, InconclusiveError

    unknown = set(ignore) - {*FRAME, "all"}
    if unknown:
        raise UsageError(f"unknown --ignore {min(unknown)!r}; known are {', '.join(FRAME)}, all.")
    found = compare(
        [open_side(path) for path in (base, *bases)],
        [open_side(path) for path in (head, *heads)],
        fail=fail,
        warn=warn,
    )
    apart = [one for one in found.differences if one.what not in ignore and "all" not in ignore]
    if apart and not explains:
        parts = "; ".join(f"{one.what} is {one.base} in the base and {one.head} now" for one in apart)
        flags = " ".join(f"--ignore {one.what!r}" if " " in one.what else f"--ignore {one.what}" for one in apart)
        raise InconclusiveError(f"The recordings are not comparable: {parts}. To compare them anyway: {flags}")
    write_output(found, form, output, rows, explains=explains, names=(base, head))
    is_undecided = any(level == "fail" and verdict.is_undecided for level, verdict in found.verdicts)
    return GateFailedError.exit_code if found.is_failed else InconclusiveError.exit_code if is_undecided else 0
