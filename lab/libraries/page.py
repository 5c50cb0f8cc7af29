"""Writes the results of the matrix into results.md, and a row for each library into docs/libraries.md."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import re
import sys
from pathlib import Path
from typing import Any

from lab.benchmarks.section import describe_machine
from lab.libraries.cells import Cell, cells
from lab.libraries.measure import CARDS, VISION
from memprof.units import format_bytes

PAGE, RESULTS = Path(__file__).resolve().parents[2] / "docs" / "libraries.md", Path(__file__).parent / "results.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
COLUMNS = (
    "cell",
    "library",
    "plain run",
    "recorded",
    "dry run",
    *CARDS,
    "plan for 70 %",
    "predicted",
    "measured",
    "error",
    "day",
)
SUMMARY = ("library", "version", "trainings", "dry run", "plan for 70 %", "prediction", "no plan")
LIBRARIES = (
    *("accelerate", "bitsandbytes", "diffusers", "lightning", "peft", "timm", "torch", "torch-geometric", "torchao"),
    *("transformers", "trl", "x-transformers"),
)
#: In a row: a reference to a sentence, a cell that is nothing else, the dry run's error, and the border of a column.
_REFERENCE, _NOTHING = re.compile(r"\[(\d+)\]"), re.compile(r"(\[\d+\])?")
_IN_BRACKETS, _BORDER = re.compile(r"\((.*)\)"), re.compile(r"(?<!\\)\|")
#: Below the table: with what the rows of a day were measured.
_MEASURED = re.compile(r"^Measured (\d{4}-\d\d-\d\d) with .*$", re.MULTILINE)
_MACHINE = re.compile(r"^Measured (\S+) with .* on: (.*)$")
_SENTENCE, _SLASHED = re.compile(r"^(\d+)\. (.*)$", re.MULTILINE), re.compile(r"\\(.)")


class Notes:
    """The sentences under the table, each numbered once."""

    def __init__(self) -> None:
        """Starts with none."""
        self.sentences: list[str] = []

    def number(self, sentence: str) -> str:
        """Returns the reference to a sentence."""
        if sentence not in self.sentences:
            self.sentences.append(sentence)
        return f"[{self.sentences.index(sentence) + 1}]"


def row(cell: Cell, found: dict[str, Any] | None, notes: Notes) -> tuple[str, ...]:
    """Returns the table's row of a cell."""
    found = found or {}
    missing = "" if _is_whole(found) else notes.number("not run: a step before it failed")
    cells_of_row = [f"`{cell.name}`", cell.library]
    plain = found.get("plain", {})
    ran = "seconds" in plain and "sentence" not in plain
    cells_of_row.append(f"{plain['seconds']:.0f} s" if ran else _said(plain, notes) or missing)
    recorded = found.get("record", {}).get("peak")
    for way in ("record", "dry", *CARDS):
        one = found.get(way, {})
        if "peak" not in one:
            cells_of_row.append(_said(one, notes) or missing)
            continue
        text = format_bytes(one["peak"])
        if way == "dry" and recorded:
            text += f" ({_signed(dry_error(found))})"
        if way == "record" and not one.get("same_losses"):
            text += " " + notes.number("the losses printed under the recorder differ from those of the plain run")
        cells_of_row.append(text)
    suggested, applied = found.get("suggest", {}), found.get("plan", {})
    cells_of_row.append(suggested.get("plan") or _said(suggested, notes) or missing)
    cells_of_row.append(format_bytes(suggested["predicted"]) if "predicted" in suggested else "")
    if "measured" in applied:
        cells_of_row += [format_bytes(applied["measured"]), _signed(applied["error"])]
    else:
        cells_of_row += [_said(applied, notes) or "", ""]
    return (*cells_of_row, found.get("day", ""))


def dry_error(found: dict[str, Any]) -> float:
    """Returns by how much the dry run's peak is off, in the steps that it and the recording have in common."""
    dry, record = found["dry"], found["record"]
    common = set(dry.get("steps", {})) & set(record.get("steps", {}))
    if not common:
        return float(dry["peak"] / record["peak"] - 1)
    return float(max(dry["steps"][step] for step in common) / max(record["steps"][step] for step in common) - 1)


def summary(cell: Cell, found: dict[str, Any]) -> str:
    """Returns a cell's results in a line, with the sentences in full."""
    notes = Notes()
    text = " | ".join(part for part in row(cell, found, notes) if part)
    said = [f"    [{number}] {sentence}" for number, sentence in enumerate(notes.sentences, 1) if f"[{number}]" in text]
    return "\n".join([text, *said])


def write_page(found: dict[str, dict[str, Any] | None]) -> None:
    """Replaces the tables of the results and of the page; rows of cells without results stay as they are."""
    notes = Notes()
    text = RESULTS.read_text(encoding="utf-8")
    before = rows_of(text, notes)
    by_cell = {cell.name: row(cell, found[cell.name], notes) for cell in cells() if found.get(cell.name)}
    by_cell = before | by_cell
    rows = [by_cell[cell.name] for cell in cells() if cell.name in by_cell]
    used = {number for each in rows for part in each for number in _numbers(part)}
    left = [f"`{cell.name}`" for cell in cells() if cell.name not in by_cell]
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|---" + "|--:" * 5 + "|---" + "|--:" * 3 + "|---|"]
    lines += ["| " + " | ".join(part.replace("|", "\\|") for part in each) + " |" for each in rows]
    if left:
        lines += ["", f"Not run yet: {', '.join(left)}."]
    order = {number: place for place, number in enumerate(sorted(used), 1)}
    lines = [_REFERENCE.sub(lambda match: f"[{order[int(match[1])]}]", line) for line in lines]
    lines += ["", *(f"{order[number]}. {_escaped(notes.sentences[number - 1])}" for number in sorted(used))]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines_of_days = {match[0]: match[1] for match in _MEASURED.finditer(text)}
    lines_of_days = {f"Measured {today} with {versions()} on: {describe_machine()}": today} | lines_of_days
    days = {dict(zip(COLUMNS, each, strict=True))["day"] for each in rows}
    measured = [line for line, day in lines_of_days.items() if day in days]
    _write(RESULTS, "\n".join(lines) + "\n\n" + "\n\n".join([counts(rows), *measured]))
    short = ["| " + " | ".join(SUMMARY) + " |", "|---|---|--:|---|--:|---|---|"]
    short += ["| " + " | ".join(each) + " |" for each in summary_rows(rows, measured[0])]
    machine = _MACHINE.sub(r"Measured up to \1: \2", measured[0])
    _write(PAGE, "\n".join(short) + f"\n\n{counts(rows)} {machine}")


def _write(page: Path, table: str) -> None:
    """Replaces what is between the markers of a page."""
    head, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def summary_rows(rows: list[tuple[str, ...]], measured: str) -> list[tuple[str, ...]]:
    """Returns a row for each library.

    Args:
        rows: Those of all cells.
        measured: The sentence that names the versions.
    """
    by_column = [dict(zip(COLUMNS, each, strict=True)) for each in rows]
    short = []
    for library in dict.fromkeys(one["library"] for one in by_column):
        own = [one for one in by_column if one["library"] == library]
        found = {name: re.search(rf"\b{name} ([\w.+]+)", measured) for name in library.split(", ")}
        version = ", ".join(match[1] for match in found.values() if match)
        dry = [_ratio(match[1]) for one in own if (match := _IN_BRACKETS.search(one["dry run"]))]
        planned = [_ratio(one["error"]) for one in own if one["error"]]
        none = ", ".join(one["cell"] for one in own if not one["error"])
        numbers = f"{len(own)}", _largest(dry), f"{len(planned)} of {len(own)}", _largest(planned)
        short.append((library, version, *numbers, none))
    return short


def _largest(errors: list[float]) -> str:
    """Returns the error of the largest size."""
    return f"{max(errors, key=abs):+.1f} %".replace("+0.0", "0.0") if errors else ""


def rows_of(text: str, notes: Notes) -> dict[str, tuple[str, ...]]:
    """Returns the rows of a page's table by cell, with the sentences that they refer to added to the notes."""
    table = text.partition(BEGIN)[2].partition(END)[0]
    said = {int(number): _SLASHED.sub(r"\1", sentence) for number, sentence in _SENTENCE.findall(table)}
    found = {}
    for line in table.splitlines():
        if line.startswith("| `"):
            parts = [part.strip().replace("\\|", "|") for part in _BORDER.split(line.strip())[1:-1]]
            parts = [_REFERENCE.sub(lambda match: notes.number(said[int(match[1])]), part) for part in parts]
            found[parts[0].strip("`")] = tuple(parts)
    return found


def counts(rows: list[tuple[str, ...]]) -> str:
    """Returns how many cells of the rows are numbers, and how near predictions came."""
    by_column = [dict(zip(COLUMNS, each, strict=True)) for each in rows]
    ways = ("plain run", "recorded", "dry run", *CARDS, "plan for 70 %", "measured")
    # Without a plan there is no measurement either: the cell is empty, and counts as a sentence.
    sentences = [_NOTHING.fullmatch(one[way]) is not None for one in by_column for way in ways]
    dry = [_ratio(match[1]) for one in by_column if (match := _IN_BRACKETS.search(one["dry run"]))]
    planned = [one for one in by_column if one["error"]]
    exact = [one for one in planned if "precision" not in one["plan for 70 %"]]
    return (
        f"{len(rows)} of {len(cells())} trainings were run; {len(sentences) - sum(sentences)} of their "
        f"{len(sentences)} cells are numbers. The dry run's peak is within 1 % of the recorded one in "
        f"{sum(abs(each) <= 1 for each in dry)} of {len(dry)}, the plan's prediction within 1 % of the measured peak "
        f"in {_near(planned)} of {len(planned)}, and in {_near(exact)} of the {len(exact)} of them that do not round "
        "to bf16, whose temporaries depend on the processor."
    )


def _near(planned: list[dict[str, str]]) -> int:
    return sum(abs(_ratio(one["error"])) <= 1 for one in planned)


def _ratio(text: str) -> float:
    """Returns the per cent that `_signed` wrote."""
    return float(text.removesuffix("%"))


def _numbers(part: str) -> list[int]:
    return [int(number) for number in _REFERENCE.findall(part)]


def versions() -> str:
    """Returns the libraries' installed versions, those in the folder of timm's too."""
    paths = [*sys.path, *filter(None, [os.environ.get(VISION)])]
    installed = {each.name: each.version for each in importlib.metadata.distributions(path=paths)}
    return ", ".join(f"{name} {installed[name]}" for name in LIBRARIES if name in installed)


def _is_whole(found: dict[str, Any]) -> bool:
    return all(way in found for way in ("plain", "record", "dry", *CARDS, "suggest"))


def _said(one: dict[str, Any], notes: Notes) -> str:
    return notes.number(one["sentence"]) if "sentence" in one else ""


def _signed(ratio: float) -> str:
    text = f"{ratio:+.1%}".replace("%", " %")
    return "0" if ratio == 0 else text.replace("+", "").replace("-", "") if text[1:] == "0.0 %" else text


def _escaped(said: str) -> str:
    return "".join("\\" + letter if letter in "<>*_[]`|" else letter for letter in said)
