"""Results: one section at a time, and all of them in results.json and as a page, rewritten after each."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memprof.trace.files.whole_file import whole_file

SCHEMA = 1
#: How a section can end. Whatever it had found by then is kept in every case.
OK, BROKEN, TIMED_OUT = "ok", "broken", "timed out"
_NO_BAR = {True: "passed", False: "NOT passed", None: "not judged here"}


@dataclass(frozen=True)
class Bar:
    """A requirement.

    Attributes:
        text: The requirement, and the result.
        passed: Whether it was passed; None where this run cannot decide, as in a rehearsal.
    """

    text: str
    passed: bool | None


@dataclass
class Section:
    """The result of one section.

    Attributes:
        name: Its name on the command line.
        title: Heading.
        how: What was measured and how, in a few sentences.
        columns: Headings of the rows.
        rows: Cells as text.
        figures: The same as numbers, a dictionary a row.
        bars: A requirement.
        notes: Sentences for the reader.
        errors: Errors of single rows; the others were measured.
        status: ``ok``, ``broken`` (it ended with an error), or ``timed out``.
        error: The end of a broken one's output.
        seconds: How long it took.
        date: When it ended, UTC.
    """

    name: str
    title: str = ""
    how: str = ""
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    status: str = OK
    error: str = ""
    seconds: float = 0.0
    date: str = ""

    @property
    def passed(self) -> bool:
        """Whether it ran to its end, lost no row, and missed no bar."""
        return self.status == OK and not self.errors and all(bar.passed is not False for bar in self.bars)

    def save(self, path: Path) -> None:
        """Writes what was found so far: a section that is ended from outside loses nothing."""
        _write(path, dataclasses.asdict(self))

    @staticmethod
    def from_json(record: dict[str, Any]) -> Section:
        """Reads what ``save`` wrote."""
        return Section(**{**record, "bars": [Bar(**bar) for bar in record.get("bars", [])]})


@dataclass
class Results:
    """All sections, in the order in which they were put."""

    folder: Path
    machine: dict[str, Any]
    sections: dict[str, Section] = field(default_factory=dict)

    @staticmethod
    def load(folder: Path, machine: dict[str, Any]) -> Results:
        """Takes over what earlier commands found on the same machine with the same torch; begins anew otherwise."""
        path = folder / "results.json"
        if path.exists():
            known = json.loads(path.read_text())
            if known.get("schema") == SCHEMA and known.get("machine") == machine:
                sections = [Section.from_json(record) for record in known["sections"]]
                return Results(folder, machine, {section.name: section for section in sections})
        return Results(folder, machine)

    @property
    def title(self) -> str:
        """What everything was measured on, and when."""
        machine, day = self.machine, datetime.datetime.now(datetime.UTC).date().isoformat()
        driver = f", driver {machine['driver']}" if machine["driver"] else ""
        cuda = f", CUDA {machine['cuda']}" if machine["cuda"] else ""
        memory = f"{machine['memory_bytes'] / 2**30:.1f} GiB"
        return (
            f"{machine['device']} ({memory}), torch {machine['torch']}{cuda}{driver}, Python {machine['python']}, {day}"
        )

    def put(self, section: Section) -> None:
        """Adds or replaces a section."""
        self.sections[section.name] = section

    def write(self) -> None:
        """Writes results.json and results.md."""
        record = {
            "schema": SCHEMA,
            "title": self.title,
            "machine": self.machine,
            "passed": {name: section.passed for name, section in self.sections.items()},
            "sections": [dataclasses.asdict(section) for section in self.sections.values()],
        }
        _write(self.folder / "results.json", record)
        with whole_file(self.folder / "results.md") as file:
            file.write(markdown_of(self).encode())

    def summary(self, done: list[Section]) -> str:
        """Says in a line or two what passed."""
        lines = [f"{section.name}: {bar.text}" for section in done for bar in section.bars if bar.passed is False]
        lines += [f"{section.name}: {section.status}: {section.error}" for section in done if section.status != OK]
        lines += [f"{section.name}: {text}" for section in done for text in section.errors]
        passed = sum(section.passed for section in done)
        return "\n".join([f"{passed} of {len(done)} sections passed.", *(f"  not: {line}" for line in lines)])


def table_of(section: Section) -> str:
    """Writes a section with its columns aligned."""
    lines = [section.title or section.name, *_aligned(section.columns, section.rows)]
    lines += [f"  {_bar(bar)}" for bar in section.bars]
    lines += [f"  note: {note}" for note in section.notes]
    lines += [f"  error: {error}" for error in section.errors]
    if section.status != OK:
        lines.append(f"  {section.status}: {section.error}")
    return "\n".join(lines)


def markdown_of(results: Results) -> str:
    """Writes all sections as a page that begins with device, torch, driver and date."""
    parts = [f"## On a GPU\n\n{results.title}\n"]
    parts += [_markdown(section) for section in results.sections.values()]
    return "\n".join(parts)


def _markdown(section: Section) -> str:
    lines = [f"### {section.title or section.name}", ""]
    if section.how:
        lines += [section.how, ""]
    if section.rows:
        lines.append("| " + " | ".join(section.columns) + " |")
        lines.append("|---" + "|--:" * (len(section.columns) - 1) + "|")
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in section.rows]
        lines.append("")
    lines += [f"**{_bar(bar)}**\n" for bar in section.bars]
    lines += [f"{note}\n" for note in section.notes]
    lines += [f"Error: {error}\n" for error in section.errors]
    if section.status != OK:
        lines.append(f"{section.status.capitalize()}: {section.error}\n")
    lines.append(f"Measured {section.date}, in {section.seconds:.0f} s.\n")
    return "\n".join(lines)


def _bar(bar: Bar) -> str:
    return f"Bar: {bar.text}: {_NO_BAR[bar.passed]}."


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    table = [list(columns), *rows]
    widths = [max(len(row[place]) for row in table) for place in range(len(columns))]
    return [
        "  " + "  ".join([row[0].ljust(widths[0]), *(map(str.rjust, row[1:], widths[1:]))]).rstrip() for row in table
    ]


def _write(path: Path, record: dict[str, Any]) -> None:
    with whole_file(path) as file:
        file.write(json.dumps(record, indent=1, default=float).encode())
