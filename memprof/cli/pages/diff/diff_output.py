"""Writes a diff in the requested format to stdout or atomically to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memprof.analysis.diff.comparison import Diff

FORMATS = ("text", "markdown", "github", "json", "benchmark", "junit", "html")


def write_text(text: str, output: Path | None) -> None:
    """Writes a text atomically to a file, or to stdout if there is none.

    Raises:
        OutputError: The file cannot be written.
    """
    if output is None:
        print(text, end="")
        return
    from memprof.trace.files.whole_file import whole_file

    with whole_file(output) as file:
        file.write(text.encode())


def render(found: Diff, form: str, rows: int, *, explains: bool, names: tuple[str, str]) -> str:
    """Returns a diff as text in the given format."""
    if form == "json":
        from memprof.cli.pages.diff.diff_data import diff_to_json

        return json.dumps(diff_to_json(found, names), indent=2, allow_nan=False) + "\n"
    if form == "benchmark":
        from memprof.cli.pages.diff.diff_data import diff_to_benchmark

        return json.dumps(diff_to_benchmark(found), indent=2) + "\n"
    if form == "junit":
        from memprof.cli.pages.diff.diff_data import diff_to_junit

        return diff_to_junit(found)
    from memprof.cli.page import Page
    from memprof.cli.pages.diff.diff_page import fill_diff, to_github, to_html, to_markdown

    if form != "text":
        return {"markdown": to_markdown, "github": to_github, "html": to_html}[form](found, rows, names)
    page = Page.for_stdout()
    fill_diff(page, found, rows, explains=explains, names=names)
    return page.render()
