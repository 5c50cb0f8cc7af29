"""The versions of torch that memprof supports and was tried with (docs/torch-versions.md)."""

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
