"""Each part is used once from a fresh environment, as the pages say; the transcript is `fresh_machine.txt`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.building.commands import ROOT
from tests.docs.fresh_machine import SESSION, TRANSCRIPT, Typed, furnish, install, transcribe, written


@pytest.mark.parametrize("typed", [one for one in SESSION if one.page], ids=lambda one: one.command)
def test_a_page_says_to_type_it(typed: Typed) -> None:
    """The session types commands that stand in the pages it names."""
    assert typed.command in (ROOT / typed.page).read_text(encoding="utf-8")


def test_the_transcript_is_of_the_session() -> None:
    """Every command is in it, in order, and ended as it should."""
    entries = _entries(TRANSCRIPT.read_text(encoding="utf-8"))
    assert [command for command, _, _ in entries] == [typed.command for typed in SESSION]
    assert {status for _, _, status in entries} == {0}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_fresh_machine_does_what_the_transcript_shows(tmp_path: Path) -> None:
    """The wheel in an empty environment: the same commands print the same, numbers and times aside."""
    programs = install(tmp_path)
    furnish(tmp_path / "work")
    now = _entries(written(transcribe(programs, tmp_path / "work"), programs, tmp_path / "work"))
    before = _entries(TRANSCRIPT.read_text(encoding="utf-8"))
    assert [(command, status) for command, _, status in now] == [(command, status) for command, _, status in before]
    for (command, said, _), (_, expected, _) in zip(now, before, strict=True):
        assert _first(said) == _first(expected), command


def _entries(text: str) -> list[tuple[str, str, int]]:
    """Returns each command of a transcript with what it printed and its exit status."""
    found = re.findall(r"^\$ (.*?)(?:  # \S+)?\n(.*?)^\[exit status (\d+)\]$", text, re.MULTILINE | re.DOTALL)
    return [(command, said, int(status)) for command, said, status in found]


def _first(said: str) -> list[str]:
    """Returns the words that a command's output begins with: figures, and which plan is fastest, depend on times."""
    line = next(iter(said.splitlines()), "")
    return re.findall(r"[A-Za-z]+", line)[:2]
