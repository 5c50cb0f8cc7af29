"""The fast part of the matrix of libraries, with what the extra `integrations` installs, and how its table is made."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lab.libraries import measure, page
from lab.libraries.cells import cells, families
from lab.libraries.run import main

FAST = {"gat": "rtx4090", "x-transformers": "h100-80g", "wav2vec2-sdpa": "rtx4090"}
NAMED = {cell.name: cell for cell in cells()}


@pytest.mark.parametrize("name", FAST)
def test_a_training_is_dry_run_on_a_card(name: str, tmp_path: Path) -> None:
    """It is a number: forward, backward and update were seen, and the model lies on the card."""
    cell = NAMED[name]
    if find_spec(cell.library.replace("-", "_")) is None:
        pytest.skip(f"{cell.library} is not installed")
    found = measure.recording(tmp_path, "card", [str(cell.path), *cell.arguments], "--dry-run", "--device", FAST[name])
    assert found.get("peak", 0) > 2**20, found


def test_every_cell_is_there() -> None:
    """Scripts exist, names are unique, and there are as many families as promised."""
    assert len(NAMED) == len(cells())
    assert all(cell.path.exists() for cell in cells())
    assert len(families()) >= 20
    assert sum(cell.library == "timm" for cell in cells()) >= 10


FOUND: dict[str, Any] = {
    "day": "2026-11-26",
    "plain": {"seconds": 4.0},
    "record": {"peak": 10 << 20, "seconds": 5.0, "same_losses": True},
    "dry": {"peak": 11 << 20, "seconds": 5.0},
    "rtx4090": {"sentence": "status 125: aten.x cannot be dry-run"},
    "h100-80g": {"peak": 20 << 20, "seconds": 5.0},
    "suggest": {"plan": "checkpoint layers.*", "predicted": 7 << 20, "seconds": 5.0},
    "plan": {"measured": 8 << 20, "error": 7 / 8 - 1, "seconds": 5.0},
}


def test_a_cell_is_a_number_or_a_sentence() -> None:
    """Numbers with units, errors with signs, and a reference to the sentence where there is none."""
    notes = page.Notes()
    row = page.row(NAMED["gat"], FOUND, notes)
    assert row[2:] == ("4 s", "10.00 MiB", "11.00 MiB (+10.0 %)", "[1]", "20.00 MiB", "checkpoint layers.*", "7.00 MiB",
                       "8.00 MiB", "-12.5 %", "2026-11-26")  # fmt: skip
    assert notes.sentences == ["status 125: aten.x cannot be dry-run"]
    assert page.row(NAMED["gat"], None, notes)[3] == "[2]"


def test_counts_are_those_of_the_cells() -> None:
    """Six of the seven are numbers; the dry run is 10 % off, the prediction 12.5 %."""
    text = page.counts([page.row(NAMED["gat"], FOUND, page.Notes())])
    assert text.startswith(f"1 of {len(NAMED)} trainings were run; 6 of their 7 cells are numbers.")
    assert "within 1 % of the recorded one in 0 of 1" in text
    assert "measured peak in 0 of 1" in text


def test_rows_without_new_results_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring one cell leaves the others' rows and their sentences, which are numbered anew."""
    path = tmp_path / "libraries.md"
    old, gone = (f"Measured {day} with torch 2.13.0 on: a laptop" for day in ("2026-11-24", "2026-11-23"))
    path.write_text(f"{page.BEGIN}\n{old}\n\n{gone}\n{page.END}\n")
    monkeypatch.setattr(page, "PAGE", path)
    lora = {"day": "2026-11-24", "plain": {"sentence": "status 1: TypeError: num_blocks | more"}}
    page.write_page({name: {"gat": FOUND, "lora": lora}.get(name) for name in NAMED})
    before = page.rows_of(path.read_text(), page.Notes())
    better = FOUND | {"rtx4090": {"peak": 20 << 20, "seconds": 5.0}}
    page.write_page({name: better if name == "gat" else None for name in NAMED})
    text = path.read_text()
    assert "| 20.00 MiB | 20.00 MiB | checkpoint" in text
    assert "cannot be dry-run" not in text
    assert page.rows_of(text, page.Notes())["lora"][:3] == before["lora"][:3]
    assert "1. status 1: TypeError: num\\_blocks \\| more\n" in text
    assert text.count(page.END) == 1
    assert old in text
    assert gone not in text


def test_the_table_replaces_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands around the markers stays."""
    path = tmp_path / "libraries.md"
    path.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    monkeypatch.setattr(page, "PAGE", path)
    page.write_page({name: FOUND if name == "gat" else None for name in NAMED})
    text = path.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| `gat` | torch-geometric | 4 s | 10.00 MiB |" in text
    assert "cannot be dry-run" in text


def test_results_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A cell with results is not measured again."""
    measure.save(FOUND, tmp_path / "gat.json")
    monkeypatch.setattr("sys.argv", ["run.py", "--only", "gat", "--kept", str(tmp_path), "--no-write"])
    main()
    assert "10.00 MiB" in capsys.readouterr().out
