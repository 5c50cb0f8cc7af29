"""Reads which torch a script's project asks for, from the files in which projects say so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

#: Files of a folder that name versions, the most exact first, and those that mark a project's root.
_LOCKS = ("uv.lock", "poetry.lock")
_FILES = (*_LOCKS, "requirements.txt", "environment.yml", "environment.yaml", "pyproject.toml", "setup.cfg")
_ROOT = (".git", "pyproject.toml", "setup.cfg", "setup.py")
#: Most folders above the script's, and most bytes of a file, that are read.
_MOST_FOLDERS, _MOST_BYTES = 6, 8 << 20
_NUMBER = r"v?\d[\w.*+]*"
#: ``torch>=2.0,<2.5``, also of conda, which calls it pytorch and writes one sign.
_REQUIRED = re.compile(
    rf"(?<![\w./-])(?:py)?torch(?:\[[^\]\n]*\])?[ \t]*\(?((?:(?:===?|[<>~!]=|[<>=])[ \t]*{_NUMBER}[ \t]*,?[ \t]*)+)"
)
#: ``torch = "^2.4"`` or ``{ version = "2.4" }`` of Poetry, and the package of a lock file.
_QUOTED = re.compile(
    r'^(?:torch[ \t]*=[ \t]*(?:\{[^}\n]*version[ \t]*=[ \t]*)?|name = "torch"\nversion = )"([\^~<>=! ]*\d[^"\n]*)"',
    re.MULTILINE,
)
_HEADER = re.compile(r"^# /// script\s*\n((?:#.*\n)+?)# ///\s*$", re.MULTILINE)


def torch_pin(words: tuple[str, ...]) -> str:
    """Returns what the project of a job asks for, such as ``torch>=2.0,<2.5 (requirements.txt)``; "" if nothing.

    Args:
        words: The job's command; its script is the first file among them.
    """
    script = next((Path(word) for word in words if word.endswith(".py") and Path(word).is_file()), None)
    for name, text in _texts(script):
        found = (None if name in _LOCKS else _REQUIRED.search(text)) or _QUOTED.search(text)
        if found is not None:
            wanted = re.sub(r"\s+", "", found[1]).rstrip(",")
            return f"torch{wanted if wanted[0] in '=<>~!^' else f'=={wanted}'} ({name})"
    return ""


def _texts(script: Path | None) -> Iterator[tuple[str, str]]:
    """Yields the names and texts to search, without comments."""
    if script is not None and (header := _HEADER.search(_read(script))):
        yield script.name, re.sub(r"^# ?", "", header[1], flags=re.MULTILINE)
    folder = (Path.cwd() if script is None else script.parent).absolute()
    for each in (folder, *folder.parents)[:_MOST_FOLDERS]:
        for name in _FILES:
            if (each / name).is_file():
                yield name, re.sub(r"^[ \t]*#.*$", "", _read(each / name), flags=re.MULTILINE)
        if any((each / name).exists() for name in _ROOT):
            return


def _read(path: Path) -> str:
    """Returns the text of a file; "" for one that cannot be read, which says nothing then."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return ""
