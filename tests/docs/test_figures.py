"""Figures that several pages quote: each has one source, and the others agree with it."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.building.commands import ROOT, name_of, pages

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(page for page in pages() if page.name != "README.md")]
#: What makes a sentence, or a cell of a table, a quote of the first figures of docs/how-true.md.
_QUOTES = re.compile(
    r"jobs (?:that )?r[au]n on an H200|\b101 jobs|\bof (?:101|79)\b(?!\.)|569,026|\b93 (?:published )?figures"
)
_NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?!\w)")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)(?: to (\d+(?:\.\d+)?))? %")


def _read(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def _section(text: str, heading: str) -> str:
    return re.split(r"^#+ ", text.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def _numbers(text: str) -> list[str]:
    return [found.rstrip(",").replace(",", "") for found in _NUMBER.findall(re.sub(r"RTX \d+", "", text))]


def _sentences(text: str) -> Iterator[str]:
    """Sentences and cells, without the targets of links and without blocks of code."""
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"^( {4}|```).*$", "", text, flags=re.MULTILINE))
    for paragraph in re.split(r"\n\s*\n|\n(?=[-*|] ?)", text):
        yield from paragraph.split("|") if paragraph.startswith("|") else re.split(r"(?<=[.:;])\s+", paragraph)


def _is_of(quoted: str, sources: list[float]) -> bool:
    """Whether a number is one of the source's, rounded to the digits quoted, or cut after them."""
    scale = 10 ** len(quoted.partition(".")[2])
    return any(
        float(quoted) in (round(source * scale) / scale, math.floor(source * scale) / scale) for source in sources
    )


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "how-true.md"], ids=name_of)
def test_figures_of_dry_runs_are_those_of_one_page(page: Path) -> None:
    """Every number in a sentence on the jobs of the H200, or on published figures, is at the top of how-true.md."""
    top = _read("how-true.md").partition("![")[0]
    assert "86" in _numbers(top)
    sources = [float(number) for number in _numbers(top)]
    quotes = [one for one in _sentences(page.read_text(encoding="utf-8")) if _QUOTES.search(one)]
    wrong = [(number, one.strip()) for one in quotes for number in _numbers(one) if not _is_of(number, sources)]
    assert not wrong


def test_overhead_of_light_recordings_is_as_measured() -> None:
    """Per cents in rows of docs/light.md that link to a measurement are those of the benchmark or of the H200."""
    with (ROOT / "lab/benchmarks/results/overhead-of-light-recordings.csv").open(encoding="utf-8") as file:
        ratios = [row[1] for row in csv.reader(file) if "--light" in row[0]]
    h200 = next(line for line in _read("gpu.md").splitlines() if "--light, every step" in line)
    measured = [100 * (float(ratio) - 1) for ratio in [*ratios, *_numbers(h200)]]
    rows = [line for line in _read("light.md").splitlines() if re.search(r"^\|.*(overhead-of-light|gpu\.md)", line)]
    quoted = [end for row in rows for ends in _PERCENT.findall(row) for end in ends if end]
    assert all(_is_of(end, measured) for end in quoted)


def test_the_comparison_has_the_benchmarks_figures() -> None:
    """Overheads of other recorders in docs/comparison.md are those of the tables that it links to."""
    recorders = _section(_read("benchmarks.md"), "Recording overhead")
    row = next(line for line in _read("comparison.md").splitlines() if "#recording-overhead" in line)
    assert set(re.findall(r"\d+\.\d+", row)) <= set(re.findall(r"\d+\.\d+", recorders))


def test_key_figures_of_benchmarks_are_those_of_their_pages() -> None:
    """Rows of the first table that link to a section of another page quote figures of that page."""
    table = _read("benchmarks.md").partition("<!-- summary: end")[0]
    for text, name in re.findall(r"^\| \[[^\]]+\]\(([\w-]+\.md)[^)]*\) \| ([^|]+) \|", table, re.MULTILINE):
        here = set(_numbers(name))
        assert here <= set(_numbers(_read(text))), (text, here - set(_numbers(_read(text))))


@pytest.mark.parametrize("page", [page for page in pages() if page.name != "index.md"], ids=name_of)
def test_no_page_says_that_recording_never_ran_on_a_gpu(page: Path) -> None:
    """It did, on an H200 (docs/gpu.md)."""
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert not re.search(r"(?:memprof|[Rr]ecord(?:ing|er))[^.|]{0,120} has not (?:yet )?(?:been )?run on a GPU", text)
