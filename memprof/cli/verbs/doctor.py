"""`memprof doctor`: whether recording works here, and suggested fixes."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memprof.errors import InconclusiveError
from memprof.units import printable

if TYPE_CHECKING:
    from memprof.launch.doctor.findings import Examination, Finding

_COLOURS = {"ok": "green", "note": "cyan", "missing": "bright_black", "fix": "yellow", "fail": "red"}
_SIGNS = {"ok": "ok", "note": "note", "missing": "-", "fix": "FIX", "fail": "FAIL"}
_WIDTH = 100


@click.command(
    epilog="""\b
Examples:
  memprof doctor
  memprof doctor --quick
  memprof doctor --build
  memprof doctor --json > environment.json
  memprof doctor --describe-card > card.json"""
)
@click.option("--quick", "is_quick", is_flag=True, help="Skip the test recording.")
@click.option("--build", "is_build", is_flag=True, help="Build the native listener for this torch.")
@click.option("--describe-card", "is_card", is_flag=True, help="Print the GPUs of this machine as JSON, to contribute.")
@click.option("--json", "is_json", is_flag=True, help="Print everything as JSON.")
def doctor(is_quick: bool, is_build: bool, is_card: bool, is_json: bool) -> int:
    """Check that recording works here and suggest fixes.

    Checks this Python's torch and its devices, the output folder, libraries, and the variables and settings in force;
    then records and reads a job of a few lines. The exit code is 0 if recording works, and 3 if it does not.

    With --build, nothing else is done: a small library in C++ is compiled against this torch, which takes about ten
    seconds, and put into the cache folder ($XDG_CACHE_HOME or ~/.cache). Recordings use it from then on to read
    allocations at less cost, with the same results. It takes a C++ compiler, and Linux.

    With --describe-card, nothing is checked: the name, compute capability, multiprocessors and memory of each GPU are
    printed, and its properties as cuDNN reads them, which dry runs describe to cuDNN on machines without one.
    """
    from memprof.launch.doctor.examine import examine

    if is_build:
        print(_build_listener())
        return 0
    if is_card:
        print(json.dumps(_describe_cards(), indent=2, allow_nan=False))
        return 0
    found = examine(Path.cwd(), os.environ, is_quick=is_quick)
    if is_json:
        print(json.dumps(found.to_json(), indent=2, allow_nan=False))
    else:
        _show(found)
    return 0 if found.works else InconclusiveError.exit_code


def _build_listener() -> str:
    """Builds it, and returns where it is."""
    from memprof.launch.doctor.torch_check import check_torch

    findings, probed = check_torch(builds=True)
    if probed.get("lacks_listener"):
        raise InconclusiveError(f"the listener could not be built: {probed['lacks_listener']}")
    if not probed.get("listener"):
        raise InconclusiveError(f"the listener cannot be built: {findings[0].what}: {findings[0].says}")
    return str(probed["listener"])


def _describe_cards() -> list[dict[str, Any]]:
    from memprof.launch.doctor.torch_check import check_torch
    from memprof.virtual.cudnn.library import CudnnError, Library, find_library

    cards = check_torch()[1].get("devices", [])
    if not cards:
        raise InconclusiveError("this Python's torch sees no NVIDIA GPU: run this on the machine that has the card")
    path = find_library()
    for number, card in enumerate(cards):
        try:
            library = None if path is None else Library(path, number)
            card["cudnn_version"] = 0 if library is None else library.version
            card["cudnn"] = {} if library is None else library.describe_device()
        except (OSError, CudnnError) as error:
            raise InconclusiveError(f"{card['name']}: {error}") from error
    return list(cards)


def _show(found: Examination) -> None:
    # Colors as elsewhere: on a terminal, or if forced; click strips them in a pipe.
    forced = os.environ.get("FORCE_COLOR", "") not in ("", "0")
    colour = False if os.environ.get("NO_COLOR") else True if forced else None
    width = 1 + max(len(finding.what) for finding in found.findings if len(finding.what) <= 24)
    for section in found.sections:
        click.echo(click.style(section.name, bold=True), color=colour)
        for finding in section.findings:
            click.echo(_line(finding, width), color=colour)
        click.echo()
    click.echo(_verdict(found), color=colour)


def _line(finding: Finding, width: int) -> str:
    from memprof.launch.doctor.findings import OK

    sign = click.style(f"{_SIGNS[finding.level]:<5}", fg=_COLOURS[finding.level])
    texts = [finding.says, finding.advice] if finding.level != OK and finding.advice else [finding.says]
    indent = " " * (9 + width)
    lines = [
        line for text in texts for line in textwrap.wrap(printable(text), _WIDTH - len(indent), break_long_words=False)
    ]
    return f"  {sign}  {printable(finding.what):<{width}}{f'{chr(10)}{indent}'.join(lines)}"


def _verdict(found: Examination) -> str:
    count = sum(finding.level in ("fix", "fail") for finding in found.findings)
    more = f"; {count} thing{'s' if count > 1 else ''} to fix, marked above" if count else ""
    tried = ", judging by its setup (the test recording was skipped)" if found.is_quick and found.works else ""
    if found.works:
        return f"Recording works here{tried}{more}. Next: memprof record train.py"
    return f"Recording does not work here{more}."
