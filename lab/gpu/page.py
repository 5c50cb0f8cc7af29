"""Results as plain text for a terminal, and as Markdown for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Sequence

from lab.gpu.results import OK, Bar, Results, Section

_NO_BAR = {True: "passed", False: "NOT passed", None: "not judged here"}


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
