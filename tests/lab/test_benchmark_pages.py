"""The pages of benchmarks: how they are written, and that short tables are those of the files with every row."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lab.benchmarks import allocator, estimates, plans, planted_changes, remat, section, unseen
from lab.benchmarks.section import Bar, Section

Rows = Sequence[tuple[str, ...]]
#: How the page's table is made of the rows in the file of each title.
BRIEFS: dict[str, Callable[[Rows], tuple[tuple[str, ...], list[tuple[str, ...]]]]] = {
    "Predicted against measured": plans.brief_of_faces,
    "Suggested plans, applied": plans.brief_of_fits,
    "Sharding": plans.brief_of_sharding,
    "Planted changes": planted_changes.brief_of,
    "Memory cap enforced by remat": lambda rows: remat.brief_of(rows[:-1]),  # the last is of planners' schedules
    "Unseen jobs": unseen.brief_of,
    "The caching allocator's model": allocator.brief_of,
    "Formulas compared with recordings": estimates.brief_of,
}


@pytest.mark.parametrize("title", BRIEFS)
def test_a_short_table_is_that_of_its_file(title: str) -> None:
    """Every cell of the page is made of the rows in the file that the section names."""
    part = (
        (section.DOCS / "benchmarks.md")
        .read_text(encoding="utf-8")
        .partition(f"### {title}\n")[2]
        .partition("\n### ")[0]
    )
    name = part.partition("Every row: `")[2].partition("`")[0]
    with (section.ROOT / name).open(encoding="utf-8", newline="") as file:
        columns, *rows = map(tuple, csv.reader(file))
    table = Section(title, "how", columns, rows, brief=BRIEFS[title](rows)).markdown().partition("how\n\n")[2]
    assert table.count("\n") >= 3
    assert table in part


def test_a_page_keeps_what_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sections, their bars and rows of other pages stay; a long table is a file, its page has the short one."""
    monkeypatch.setattr(section, "ROOT", tmp_path)
    monkeypatch.setattr(section, "RESULTS", tmp_path / "results")
    path = tmp_path / "benchmarks.md"
    elsewhere, kept = "| [H200](gpu.md#figures) | 1 | 2 | yes |", "| [Kept](#kept) | 3 | 4 | yes |"
    table = f"| what | measured | bar | met |\n|---|---|---|---|\n{kept}\n{elsewhere}\n| [Anew](#anew) | 5 | 6 | yes |"
    path.write_text(
        f"# Page\n\n{section.SUMMARY_BEGIN}\n{table}\n{section.SUMMARY_END}\n\n"
        f"{section.BEGIN}\n### Anew\n\nformer\n\n### Kept\n\nas it is\n{section.END}\ntail\n",
        encoding="utf-8",
    )
    bar, brief = Bar("at most 2", "3", passed=False), (("n",), [("2",)])
    section.write_page(path, [Section("Anew", "how", ("n",), [("1",), ("3",)], bar, brief=brief)])
    text = path.read_text(encoding="utf-8")
    assert f"{elsewhere}\n| [Anew](#anew) | 3 | at most 2 | **no** |\n{kept}\n{section.SUMMARY_END}" in text
    assert "former" not in text
    assert "| n |\n|---|\n| 2 |\n" in text
    assert text.endswith("### Kept\n\nas it is\n<!-- measured: end -->\ntail\n")
    assert (tmp_path / "results" / "anew.csv").read_text(encoding="utf-8") == "n\n1\n3\n"
