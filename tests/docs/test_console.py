"""Blocks of commands with their output: the pages show what is printed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from docs.building import console
from docs.building.commands import commands_of, name_of, pages
from docs.building.workshop import Workshop

PAGES = [page for page in pages() if console.entries_of(page.read_text(encoding="utf-8"))]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_pages_commands_print_what_it_says(page: Path, tmp_path: Path) -> None:
    """Each command of a page's console blocks, run in order in one folder, prints what stands below it."""
    entries = console.entries_of(page.read_text(encoding="utf-8"))
    block = "\n".join(["```", *(entry.command for entry in entries), "```"])
    folder = Workshop(tmp_path).bench([shlex.split(found.text) for found in commands_of(block, "page")])
    wrong = [console.difference(entry, console.printed(entry.command, folder)) for entry in entries]
    assert not any(wrong), "\n".join(filter(None, wrong))


def test_a_block_is_filled_with_what_its_commands_print(tmp_path: Path) -> None:
    """The output on the site is what the command prints there and then, on both streams; the rest of the page stays."""
    page = "before\n\n```console\n$ echo one; echo two >&2\nold\n$ echo three > file\n$ cat file\n```\n\nafter\n"
    assert console.filled(page, tmp_path) == (
        "before\n\n```console\n$ echo one; echo two >&2\none\ntwo\n$ echo three > file\n$ cat file\nthree\n```\n"
        "\nafter\n"
    )


def test_a_command_that_fails_breaks_the_build(tmp_path: Path) -> None:
    """A page whose command fails is not built with the failure in it."""
    with pytest.raises(RuntimeError, match="exit 3 ended with status 3:\nsaid"):
        console.filled("```console\n$ echo said; exit 3\n```\n", tmp_path)
