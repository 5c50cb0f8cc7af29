"""The pictures in the pages: each is there, has a text for those who do not see it, and is one that the build makes."""

from __future__ import annotations

import re
from pathlib import Path

from docs.building.commands import ROOT, pages
from lab.pictures import catalogue
from lab.pictures.diagrams import DIAGRAMS, FOLDER

_IMAGE = re.compile(r'!\[(?P<alt>[^\]]*)\]\((?P<path>[^)\s]+)\)|<img src="(?P<own>[^"]+)" alt="(?P<text>[^"]*)"')
_DARK = re.compile(r'srcset="([^"]+)"')


def _shown() -> dict[Path, list[tuple[Path, str]]]:
    """Returns the pictures of each page, with their texts; the dark one of a pair has the text of the light one."""
    shown: dict[Path, list[tuple[Path, str]]] = {}
    for page in pages():
        text = page.read_text(encoding="utf-8")
        found = [(one["path"] or one["own"], one["alt"] or one["text"] or "") for one in _IMAGE.finditer(text)]
        found += [(path, "the dark one of a pair") for path in _DARK.findall(text)]
        shown[page] = [(page.parent / path, alt) for path, alt in found if "://" not in path]
    return shown


def test_every_picture_of_a_page_is_there_and_has_a_text() -> None:
    """A page names files of the repository; a text says what the picture shows."""
    for page, pictures in _shown().items():
        for path, alt in pictures:
            assert path.is_file(), f"{page.name}: {path}"
            assert len(alt) > 15, f"{page.name}: {path} has no text"
        dark = {str(path).replace("-dark.", "-light.") for path, _ in pictures if "-dark." in path.name}
        assert dark == {str(path) for path, _ in pictures if "-light." in path.name}, page.name


def test_the_build_makes_the_pictures_that_there_are() -> None:
    """`make pictures` and the folders agree, and no picture is made that no page shows."""
    made = {ROOT / catalogue.FOLDER / name for name in catalogue.files()}
    made |= {ROOT / FOLDER / f"{name}.svg" for name in DIAGRAMS}
    there = {path for folder in (catalogue.FOLDER, FOLDER) for path in (ROOT / folder).iterdir()}
    assert made == there
    shown = {path.resolve() for pictures in _shown().values() for path, _ in pictures}
    assert {path.resolve() for path in made} <= shown


def test_diagrams_are_as_the_build_draws_them() -> None:
    """They follow from the code alone, so the files are equal to it."""
    for name, draw in DIAGRAMS.items():
        assert (ROOT / FOLDER / f"{name}.svg").read_text(encoding="utf-8") == draw(), f"make pictures: {name} is stale"


def test_pictures_are_small() -> None:
    """A clone stays small: all of them together, and each."""
    sizes = [path.stat().st_size for path in (ROOT / catalogue.FOLDER).iterdir()]
    assert max(sizes) < 250_000
    assert sum(sizes) < 3_000_000
