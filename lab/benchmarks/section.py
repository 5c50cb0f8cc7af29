"""One table of measured figures, for the terminal and for docs/benchmarks.md."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True)
class Section:
    """One benchmark's result.

    Attributes:
        title: Heading.
        how: What was measured and how, in a few sentences.
        columns: Column headings; all but the first are set to the right.
        rows: Cells as text.
        bar: The bar to pass and whether it was passed; empty where there is none.
        page: File of docs/ that the table is in.
    """

    title: str
    how: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bar: str = ""
    page: str = "benchmarks.md"

    def table(self) -> Table:
        """Renders the section for the terminal."""
        table = Table(title=self.title, caption=self.bar or None, title_justify="left", caption_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Renders the section for the page."""
        lines = [f"### {self.title}", "", self.how, ""]
        lines.append("| " + " | ".join(self.columns) + " |")
        lines.append("|---" + "|--:" * (len(self.columns) - 1) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        if self.bar:
            lines += ["", f"**{self.bar}**"]
        return "\n".join(lines) + "\n"


def verdict(text: str, *, passed: bool) -> str:
    """Returns the sentence for a bar and whether it was passed."""
    return f"Bar: {text}: {'passed' if passed else 'NOT passed'}."
