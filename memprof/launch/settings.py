"""What the user asks of a recording, and the part of it written down in pyproject.toml."""

from __future__ import annotations

import difflib
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.errors import UsageError

if TYPE_CHECKING:
    from memprof.policies.plan import Plan


@dataclass(frozen=True)
class Settings:
    """How to record a job.

    Attributes:
        output: File to write, or None for ``<script>.<time>.memprof`` in the current folder.
        force: Replace a recording that is already there.
        quiet: Say nothing when the job has ended.
        skip: Steps to let pass before the window.
        steps: Steps to record.
        stop: End the job after the window.
        plan: Plan to run the job under, or None.
        plan_path: File the plan or a part of it is in, None where it is made of flags alone.
    """

    output: Path | None = None
    force: bool = False
    quiet: bool = False
    skip: int = 2
    steps: int = 3
    stop: bool = False
    plan: Plan | None = None
    plan_path: Path | None = None


#: The keys of ``[tool.memprof]``, with the least value of those that count something.
_KEYS: dict[str, type] = {
    "output": str,
    "force": bool,
    "quiet": bool,
    "skip": int,
    "steps": int,
    "stop": bool,
    "plan": str,
}
_LEAST = {"skip": 0, "steps": 1}
_KIND = {str: "a text", bool: "true or false", int: "a whole number"}


def read_project_settings(folder: Path) -> dict[str, Any]:
    """Reads ``[tool.memprof]`` from the nearest pyproject.toml, in this folder or above it.

    Args:
        folder: Where the search begins, usually the current folder.

    Returns:
        The settings given there; a relative output or plan counts from the folder of the pyproject.toml.

    Raises:
        UsageError: The file is not TOML, or holds a key or a value that memprof does not know.
    """
    for candidate in (folder, *folder.parents):
        path = candidate / "pyproject.toml"
        if path.is_file():
            return _read(path)
    return {}


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text).get("tool", {}).get("memprof", {})
    except OSError:
        # Somebody else's unreadable file further up must not forbid recording.
        return {}
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, AttributeError) as error:
        # A broken pyproject.toml that says nothing to memprof is not for memprof to complain about.
        if "tool.memprof" not in path.read_text(encoding="utf-8", errors="replace"):
            return {}
        raise UsageError(f"{path} cannot be read: {error}. Correct it, or record from another folder.") from None
    if not isinstance(table, dict):
        raise UsageError(f"{path}: tool.memprof is not a table. Write [tool.memprof] and its keys below it.")
    settings = {key: _checked(path, key, value) for key, value in table.items()}
    for key in ("output", "plan"):
        if key in settings:
            settings[key] = os.path.join(path.parent, os.path.expanduser(settings[key]))
    return settings


def _checked(path: Path, key: str, value: Any) -> Any:
    if key not in _KEYS:
        near = difflib.get_close_matches(key, _KEYS, n=1)
        advice = f"Did you mean {near[0]}?" if near else f"The keys are {', '.join(_KEYS)}."
        raise UsageError(f"{path}: [tool.memprof] has no key {key}. {advice}")
    kind = _KEYS[key]
    # To Python, true is a whole number too.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UsageError(f"{path}: {key} in [tool.memprof] must be {_KIND[kind]}, not {value!r}.")
    if isinstance(value, int) and value < _LEAST.get(key, 0):
        raise UsageError(f"{path}: {key} in [tool.memprof] must be {_LEAST.get(key, 0)} or more, not {value}.")
    return value
