"""The versions of torch that memprof supports (docs/torch-versions.md), and the one that a project asks for."""

from __future__ import annotations

import re
from pathlib import Path

from memprof.trace.files.private_file import write_private

#: The oldest supported torch, as in pyproject.toml.
OLDEST = "2.11"
#: The newest torch that the tests ran with.
NEWEST = "2.15"
_MARK = "newer-torch"
#: Variables read while torch is imported: a script that sets one before must import them anew.
_READ_AT_IMPORT = ("TORCH", "PYTORCH", "OMP_", "GOMP_", "MKL_", "KMP_", "OPENBLAS_", "ATEN_")
#: Variables with such a name that are read later.
_READ_LATER = frozenset({"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"})
#: Files of a folder that name versions, the most exact first, and those that mark a project's root.
_LOCKS = ("uv.lock", "poetry.lock")
_FILES = (*_LOCKS, "requirements.txt", "environment.yml", "environment.yaml", "pyproject.toml", "setup.cfg")
_ROOT = (".git", "pyproject.toml", "setup.cfg", "setup.py")
_MOST_FOLDERS = 6
#: ``torch>=2.0,<2.5``, also of conda (``pytorch=2.3``) and Poetry (``torch = "^2.4"``, ``{ version = "2.4" }``).
_ASKED = re.compile(
    r"^[^#\n]*?(?<![\w./-])(?:py)?torch(?:\[[^\]\n]*\])?[ \t]*"
    r'(?:=[ \t]*(?:\{[^}\n]*version[ \t]*=[ \t]*)?"|\(?(?=[<>=~!]))((?:[\^~<>=! \t]*v?\d[\w.*+]*[ \t]*,?)+)',
    re.MULTILINE,
)
_LOCKED = re.compile(r'^name = "torch"\nversion = "([^"\n]+)"', re.MULTILINE)
_HEADER = re.compile(r"^# /// script[ \t]*\n#((?:.*\n#)+?) ///[ \t]*$", re.MULTILINE)


def as_numbers(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version, for comparing versions."""
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)


def mark_if_newer(version: str, spool: Path) -> None:
    """Leaves a mark for the parent where a process of the job has a newer torch than was tried.

    Raises:
        OSError: The mark cannot be written.
    """
    if as_numbers(version) > as_numbers(NEWEST):
        write_private(spool / _MARK, version)


def describe_newer(spool: Path) -> str:
    """Returns the warning about a job's torch, once for all its processes; "" if it is one that was tried."""
    try:
        version = (spool / _MARK).read_text(encoding="utf-8")
    except OSError:
        return ""
    return f"warning: torch {version} is newer than {NEWEST}, the newest that memprof was tried with."


def is_read_at_import(name: str) -> bool:
    """Returns whether an environment variable is read while torch is imported."""
    return name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER


def torch_pin(words: tuple[str, ...]) -> str:
    """Returns what the project of a job asks for, such as ``torch>=2.0,<2.5 (requirements.txt)``; "" if nothing.

    Args:
        words: The job's command; its script is the first file among them.
    """
    script = next((Path(word) for word in words if word.endswith(".py") and Path(word).is_file()), None)
    header = None if script is None else _HEADER.search(_read(script))
    texts = [] if script is None or header is None else [(script.name, header[1].replace("\n#", "\n"))]
    folder = (Path.cwd() if script is None else script.parent).absolute()
    for each in (folder, *folder.parents)[:_MOST_FOLDERS]:
        texts += [(name, _read(each / name)) for name in _FILES if (each / name).is_file()]
        if any((each / name).exists() for name in _ROOT):
            break
    for name, text in texts:
        if found := (_LOCKED if name in _LOCKS else _ASKED).search(text):
            wanted = re.sub(r"\s+", "", found[1]).rstrip(",")
            return f"torch{wanted if wanted[0] in '=<>~!^' else f'=={wanted}'} ({name})"
    return ""


def _read(path: Path) -> str:
    """Returns the text of a file; "" for one that cannot be read, which says nothing then."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
