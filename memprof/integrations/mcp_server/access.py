"""Which files a caller may name, and the ids under which recordings, plans and answers are kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memprof.errors import UsageError


class Access:
    """The folders that a caller may read, and what was made for the caller.

    Attributes:
        roots: The folders, resolved; the first is the one in which jobs run.
    """

    def __init__(self, roots: Sequence[Path], scratch: Path) -> None:
        """Takes the folders, and an empty one for what is made.

        Args:
            roots: At least one folder.
            scratch: A folder of this process alone.

        Raises:
            UsageError: One of them is not a folder.
        """
        for root in roots:
            if not root.is_dir():
                raise UsageError(f"--root {root} is not a folder.")
        self.roots = tuple(root.resolve() for root in roots)
        self._scratch = scratch
        self._made: dict[str, Path] = {}
        self._answers: dict[str, Any] = {}
        self._counts: dict[str, int] = {}

    def read(self, name: str) -> Path:
        """Returns the file or folder that a name or an id stands for.

        Args:
            name: An id such as ``run1``, or a path, relative to the first folder or absolute.

        Raises:
            UsageError: It does not exist, or is outside the folders, links followed.
        """
        if name in self._made:
            return self._made[name]
        try:
            path = (self.roots[0] / name).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            raise UsageError(f"{name[:200]!r} is neither a file here nor an id; {_known(self._made)}.") from None
        if not any(path.is_relative_to(root) for root in self.roots):
            raise UsageError(f"{name[-200:]!r} is outside the folders of this server.")
        return path

    def make(self, kind: str, suffix: str) -> tuple[str, Path]:
        """Returns a new id and the path of its file; ``keep`` makes it known once that is written.

        Args:
            kind: ``run`` or ``plan``.
            suffix: The file's suffix.
        """
        name = self._next(kind)
        return name, self._scratch / f"{name}{suffix}"

    def keep(self, name: str, path: Path) -> None:
        """Makes an id known."""
        self._made[name] = path

    def note(self, answer: Any) -> str:
        """Keeps a whole answer, and returns its id."""
        name = self._next("answer")
        self._answers[name] = answer
        return name

    def answer(self, name: str) -> Any:
        """Returns a whole answer.

        Raises:
            UsageError: There is none of this id.
        """
        if name not in self._answers:
            raise UsageError(f"There is no answer {name[:200]!r}; {_known(self._answers)}.")
        return self._answers[name]

    def _next(self, kind: str) -> str:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        return f"{kind}{self._counts[kind]}"


def _known(ids: dict[str, Any]) -> str:
    return f"ids so far: {', '.join([*ids][-20:]) or 'none yet'}"
