"""Blocks of a page in which commands and their output stand: run when the site is built, and compared by a test.

A block is fenced as ``console``. Its lines that begin with ``$ `` are run in order, all blocks of a page in one folder;
what follows each is its output on stdout and stderr, in which ``...`` stands for what differs from run to run.
"""

from __future__ import annotations

import doctest
import re
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs.building.workshop import PATIENCE_S, environment

_BLOCK = re.compile(r"^```console\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
_PROMPT = "$ "
#: How lines begin that hold a sentence of memprof's own.
_SENTENCE = ("memprof: ", "warning: ", "peak ")
#: Characters that a block of the site is wide, at its widest.
_SENTENCE_WIDTH = 104
_LIKE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Entry:
    """A command of a block, and what the page says it prints; status is what it ends with."""

    command: str
    expected: str


def entries_of(markdown: str) -> list[Entry]:
    """Returns every command of a page's blocks, in order."""
    return [entry for block in _BLOCK.finditer(markdown) for entry in _entries(block["body"])]


def filled(markdown: str, folder: Path, most_lines: int = 0) -> str:
    """Returns a page whose blocks hold what their commands print here and now.

    Args:
        markdown: The page.
        folder: Where the commands are run.
        most_lines: Lines of an output that are shown at most; 0 for all.

    Raises:
        RuntimeError: A command failed; the message has what it printed.
    """

    def fill(block: re.Match[str]) -> str:
        lines = []
        for entry in _entries(block["body"]):
            output = [part for line in printed(entry.command, folder).splitlines() for part in _folded(line)]
            lines += [_PROMPT + entry.command, *(_shortened(output, most_lines) if most_lines else output)]
        return "```console\n" + "\n".join(lines) + "\n```"

    return _BLOCK.sub(fill, markdown)


def printed(command: str, folder: Path) -> str:
    """Runs a command and returns what it prints on stdout and stderr, in the order in which it came.

    Raises:
        RuntimeError: It failed.
    """
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command} ended with status {done.returncode}:\n{done.stdout}")
    return done.stdout


def difference(entry: Entry, output: str) -> str:
    """Compares an output with what the page says; "" where they agree, else both, one above the other."""
    checker = doctest.OutputChecker()
    expected = entry.expected if entry.expected.strip() else "\n"
    # doctest takes an ellipsis at the start of an output for a continuation of its prompt: nothing begins so here.
    if checker.check_output(expected.rstrip() + "\n", output.rstrip() + "\n", _LIKE):
        return ""
    return f"$ {entry.command}\nthe page says:\n{expected}\nit printed:\n{output}"


def _entries(body: str) -> Iterator[Entry]:
    command = ""
    expected: list[str] = []
    for line in body.splitlines():
        if line.startswith(_PROMPT):
            if command:
                yield Entry(command, "\n".join(expected))
            command, expected = line.removeprefix(_PROMPT), []
        else:
            expected.append(line)
    if command:
        yield Entry(command, "\n".join(expected))


def _folded(line: str) -> list[str]:
    """Breaks a long sentence as a terminal would; tables and what was typed stay as they are."""
    if not line.startswith(_SENTENCE):
        return [line]
    return textwrap.wrap(line, _SENTENCE_WIDTH, break_long_words=False, break_on_hyphens=False) or [line]


def _shortened(lines: list[str], most: int) -> list[str]:
    if len(lines) <= most:
        return lines
    return [*lines[:most], f"... ({len(lines) - most} lines more)"]
