"""Pages in a pipe: tables are wrapped to a width, and nothing of a cell is lost."""

from __future__ import annotations

import shutil
from operator import itemgetter
from pathlib import Path

import pytest
from rich.text import Text

from memprof.analysis.table import FIGURE, NAME, TEXT, WORDS, FactTable, shown, sized_parts
from memprof.cli.main import main
from memprof.cli.page import Page

SAMPLES = Path(__file__).parents[2] / "sample_traces"
SENTENCE = " ".join(f"word{number}" for number in range(60))
PLACE = f"{'folder/' * 8}train.py:1234"


def table_page(width: int) -> list[str]:
    page = Page(is_terminal=False, width=width, has_colour=False)
    units = {"plan": TEXT, "bytes": FIGURE, "module": NAME, "line": NAME, "why": WORDS}
    rows = (
        (SENTENCE, "93,237,072 B", "layers.0.mlp", PLACE, "x" * 300),
        ("short", "1 B", "head", "a.py:1", "none"),
    )
    page.add(FactTable(tuple(shown(name, unit, itemgetter(at)) for at, (name, unit) in enumerate(units.items())), rows))
    return page.render().splitlines()


def test_a_wide_table_wraps_and_loses_nothing() -> None:
    """Words go on in the next line, also those longer than the column; bytes and places stay whole."""
    lines = table_page(160)
    assert max(map(len, lines)) <= 160
    text = " ".join(lines)
    for whole in (*SENTENCE.split(), "93,237,072 B", PLACE, "layers.0.mlp"):
        assert whole in text
    assert text.count("x") == 300
    assert "…" not in text
    assert lines[-1].split() == ["short", "1", "B", "head", "a.py:1", "none"]


def test_a_table_that_cannot_be_narrower_is_whole() -> None:
    """Where numbers and places alone need more than the width, they get it."""
    lines = table_page(60)
    assert PLACE in " ".join(lines)
    assert "93,237,072 B" in lines[1]
    assert 60 < max(map(len, lines)) < 160


def test_a_table_that_fits_is_drawn_as_it_is() -> None:
    """Lines end with their cells, and sentences are never wrapped: one sentence, one line."""
    page = Page(is_terminal=False, width=40, has_colour=False)
    page.add(sized_parts("name", {"a": 1}, 0))
    page.add(Text(SENTENCE))
    assert page.render() == f"name  bytes  share\na       1 B\n{SENTENCE}\n"


@pytest.mark.parametrize(("columns", "widest"), [(None, 160), ("100", 110), ("none", 160), ("0", 160)])
def test_piped_tables_have_a_width(
    columns: str | None,
    widest: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """160 columns, or COLUMNS; reasons were 280 and more. A command to type stays on one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    shutil.copy(SAMPLES / "gpt" / "run.memprof", "run.memprof")
    assert main(["suggest", "run.memprof", "--budget", "60%", "--allow", "checkpoint,compile,accumulate"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("Plans that fit"))
    end = next(number for number, line in enumerate(lines) if line.startswith("lowest peak found"))
    assert max(map(len, lines[start:end])) <= widest
    assert any(line.startswith("next: memprof suggest run.memprof --budget ") for line in lines[end:])
