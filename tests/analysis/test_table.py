"""One table of facts in every medium: a column added to it is in text, Markdown, HTML, JSON and JSON Schema."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest

from memprof.analysis.report import report_tables
from memprof.analysis.table import (
    BYTES,
    COUNT,
    NAME,
    NUMBERS,
    SHARE,
    TEXT,
    WORDS,
    Cell,
    Column,
    FactTable,
    records,
    row_of,
    row_schema,
    rows_of,
    shown,
)
from memprof.cli.main import main
from memprof.cli.page import Page, html_table
from memprof.cli.pages.diff.diff_page import table_lines
from tests.json_outputs import SCHEMAS

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "gpt" / "run.memprof"


@dataclass(frozen=True)
class _Part:
    name: str | None
    bytes: int
    storages: int = 1


COLUMNS = (
    Column("name", "module", NAME, meaning="qualified name", missing="(outside)"),
    Column("bytes", "bytes", BYTES),
    shown("share", SHARE, lambda part: part.bytes),
    shown("", SHARE, lambda part: Cell("", category="gradient", bar=part.bytes), key="bar", is_bar=True),
    Column("storages", None, COUNT),
    shown("remark", TEXT, lambda part: "", is_optional=True),
    shown("more", TEXT, lambda part: "on wide pages", is_wide=True),
)


def _table() -> FactTable:
    table = FactTable(COLUMNS, [_Part("a|b", 3072), _Part(None, 1024)], 4096)
    table.add("total", name=Cell("all"), bytes=4096, share=4096)
    return table


def _text(table: FactTable, *, is_terminal: bool = False) -> list[list[str]]:
    page = Page(is_terminal=is_terminal, width=120, has_colour=False)
    page.add(table)
    return [line.split() for line in page.render().splitlines()]


def test_text_has_the_columns_there_is_room_for() -> None:
    """Units, shares of the whole, words for what is unknown; bars on a terminal alone; no empty optional column."""
    assert _text(_table()) == [
        ["module", "bytes", "share"],
        ["a|b", "3.00", "KiB", "75.0", "%"],
        ["(outside)", "1.00", "KiB", "25.0", "%"],
        ["all", "4.00", "KiB", "100.0", "%"],
    ]
    assert _text(_table(), is_terminal=True)[1][-1] == "█" * 12


def test_columns_give_way_where_text_is_narrow() -> None:
    """The one of the highest number first, until words have the least width and numbers are whole."""
    columns = (
        shown("plan", WORDS, lambda row: "word " * 12),
        shown("peak", BYTES, lambda row: 3072),
        shown("saved", BYTES, lambda row: 1024, gives_way=2),
        shown("source", TEXT, lambda row: "modelled", gives_way=1),
    )
    for width, heads in (
        (120, ["plan", "peak", "saved", "source"]),
        (50, ["plan", "peak", "source"]),
        (40, ["plan", "peak"]),
    ):
        page = Page(is_terminal=True, width=width, has_colour=False)
        page.add(FactTable(columns, [0]))
        lines = page.render().splitlines()
        assert lines[0].split() == heads
        assert "…" not in "".join(lines)


def test_markdown_escapes_cells() -> None:
    """Nothing in a name ends a cell."""
    assert table_lines(FactTable(COLUMNS[:2], [_Part("a|b", 1)]))[1:] == ["|---|--:|", r"| a\|b | 1 B |"]


def test_json_has_values_and_a_schema_that_allows_them() -> None:
    """A row's keys are those of columns that are in JSON, with their values as they are; so says the schema."""
    rows = records(COLUMNS, [_Part("a|b", 3072, 2), _Part(None, 1024)])
    assert rows[0] == {"name": "a|b", "bytes": 3072, "storages": 2}
    schema = row_schema(COLUMNS)
    assert schema["properties"]["name"] == {"type": ["null", "string"], "description": "qualified name"}
    for row in rows:
        jsonschema.validate(row, schema)
        assert set(row) == set(schema["required"])
    assert not jsonschema.Draft202012Validator(schema).is_valid({**rows[0], "bytes": "3 KiB"})
    assert row_schema([Column("ranks", None, NUMBERS)])["properties"]["ranks"]["items"] == {"type": "integer"}


@dataclass(frozen=True)
class _Whole:
    parts: tuple[_Part, ...]
    largest: _Part | None


def test_rows_inside_a_row_are_in_json_and_its_schema() -> None:
    """A value that is rows of a table, or one row, has their keys; an unknown one is null."""
    inside = (Column("name", None), Column("bytes", None, BYTES))
    columns = (Column("parts", None, rows_of(inside)), Column("largest", None, row_of(inside)))
    part = {"name": "a", "bytes": 1}
    schema = row_schema(columns)
    for whole, value in (
        (_Whole((_Part("a", 1),), _Part("a", 1)), {"parts": [part], "largest": part}),
        (_Whole((), None), {"parts": [], "largest": None}),
    ):
        assert records(columns, [whole]) == [value]
        jsonschema.validate(value, schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert not validator.is_valid({"parts": [{"name": "a"}], "largest": None})
    assert not validator.is_valid({"parts": [], "largest": {"name": "a", "bytes": "1 B"}})


def test_an_optional_column_is_there_for_a_known_value_alone() -> None:
    """What stands for an unknown value does not keep it; 0 is known."""
    column = shown("host", BYTES, lambda part: part.bytes, missing="-", is_optional=True)
    for sizes, heads in (((None, None), ["name"]), ((None, 0), ["name", "host"])):
        table = FactTable((Column("name", "name"), column), [_Part("a", size) for size in sizes])  # type: ignore[arg-type]
        assert [one.heading for one in table.columns] == heads


def test_a_network_free_page_escapes_cells() -> None:
    """Numbers are aligned, further lines follow, and nothing of a name is markup."""
    columns = (shown("<name>", WORDS, lambda row: Cell(row[0], lines=row[1:])), shown("bytes", BYTES, len))
    page = html_table(FactTable(columns, [("<b>", "& more")]))
    assert '<th>&lt;name&gt;</th><th class="number">bytes</th>' in page
    assert '<td>&lt;b&gt;<br>&amp; more</td><td class="number">2 B</td>' in page


def test_html_has_every_column() -> None:
    """With the meaning of a heading, the class of a row, and the bar as a share of the whole."""
    markup = pytest.importorskip("memprof_dashboard.markup")
    page = markup.table(_table())
    assert '<th scope="col" title="qualified name">module</th>' in page
    assert "on wide pages" in page
    assert "width:75.0%" in page
    assert '<tr class="total">' in page
    assert "remark" not in page


def test_a_column_of_a_report_is_one_edit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Added to a table's columns, it is in the text, the JSON and the printed schema."""
    column = Column("half_bytes", "half", BYTES, lambda part: part.bytes // 2)
    more = (*report_tables.OPERATORS, column)
    monkeypatch.setattr(report_tables, "OPERATORS", more)
    monkeypatch.setitem(report_tables.SPLITS, "by_op", more)
    assert main(["report", str(SAMPLE), "--by", "op"]) == 0
    assert re.search(r"^operator .* half$", capsys.readouterr().out, re.MULTILINE)
    assert main(["report", str(SAMPLE), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["at_peak"]["by_op"][0]
    assert row["half_bytes"] == row["bytes"] // 2
    assert main(["schema", "report"]) == 0
    printed = json.loads(capsys.readouterr().out)["properties"]["at_peak"]["properties"]["by_op"]["items"]
    assert printed["properties"]["half_bytes"] == {"type": ["integer", "null"]}
    assert "half_bytes" not in (SCHEMAS / "report.json").read_text(encoding="utf-8")
