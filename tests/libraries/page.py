"""Writes the results of the matrix as the table of docs/libraries.md."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

from memprof.units import format_bytes
from tests.benchmarks.machine import describe_machine
from tests.libraries.cells import Cell, cells
from tests.libraries.measure import CARDS, VISION

PAGE = Path(__file__).resolve().parents[2] / "docs" / "libraries.md"
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
)
LIBRARIES = (
    *("accelerate", "bitsandbytes", "diffusers", "lightning", "peft", "timm", "torch", "torch-geometric", "torchao"),
    *("transformers", "trl", "x-transformers"),
)


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
    return tuple(cells_of_row)


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
    """Replaces the table between the markers of the page."""
    notes = Notes()
    rows = [row(cell, found[cell.name], notes) for cell in cells() if found.get(cell.name)]
    left = [f"`{cell.name}`" for cell in cells() if not found.get(cell.name)]
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|---" + "|--:" * 5 + "|---" + "|--:" * 3 + "|"]
    lines += ["| " + " | ".join(part.replace("|", "\\|") for part in each) + " |" for each in rows]
    if left:
        lines += ["", f"Not run yet: {', '.join(left)}."]
    lines += ["", *(f"{number}. {_escaped(said)}" for number, said in enumerate(notes.sentences, 1))]
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    measured = f"{counts(found)}\n\nMeasured {day} with {versions()} on: {describe_machine()}\n"
    PAGE.write_text(f"{head}{BEGIN}\n" + "\n".join(lines) + f"\n\n{measured}{END}{tail}", encoding="utf-8")


def counts(found: dict[str, dict[str, Any] | None]) -> str:
    """Returns how many cells are numbers, and how near predictions came."""
    ways = ("plain", "record", "dry", *CARDS, "suggest", "plan")
    run = {name: one for name, one in found.items() if one is not None}
    numbers = sum(way in one and "sentence" not in one[way] for one in run.values() for way in ways)
    planned = [one for one in run.values() if "error" in one.get("plan", {})]
    exact = [one for one in planned if "precision" not in one["suggest"]["plan"]]
    dry = [one for one in run.values() if "peak" in one.get("dry", {}) and "peak" in one.get("record", {})]
    near = sum(abs(dry_error(one)) <= 0.01 for one in dry)
    return (
        f"{len(run)} of {len(found)} trainings were run; {numbers} of their {len(ways) * len(run)} cells are numbers. "
        f"The dry run's peak is within 1 % of the recorded one in {near} of {len(dry)}, the plan's prediction within "
        f"1 % of the measured peak in {_near(planned)} of {len(planned)}, and in {_near(exact)} of the {len(exact)} of "
        "them that do not round to bf16, whose temporaries depend on the processor."
    )


def _near(planned: list[dict[str, Any]]) -> int:
    return sum(abs(one["plan"]["error"]) <= 0.01 for one in planned)


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
