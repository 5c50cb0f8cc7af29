"""Which files a caller may name, under which ids results are kept, and which jobs a caller may start."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from memprof.errors import UsageError

#: Programs and modules that start a script on several processes, with the words before their options.
_LAUNCHERS: dict[str, tuple[str, ...]] = {
    "torchrun": (),
    "accelerate": ("launch",),
    "deepspeed": (),
    "lightning": ("run", "model"),
    "fabric": ("run",),
    "torch.distributed.run": (),
    "torch.distributed.launch": (),
    "accelerate.commands.launch": (),
}
#: Options of theirs that say how many processes to start, and how these find one another; others may start programs.
_OPTION = re.compile(
    r"--(nproc.per.node|nnodes|node.rank|rdzv.(endpoint|backend|id)|master.(addr|port)|max.restarts"
    r"|num.(processes|machines|gpus|nodes)|machine.rank|main.process.(ip|port)|mixed.precision|precision"
    r"|accelerator|strategy|devices|dynamo.backend)(=[\w.:-]*)?"
)
_SWITCH = re.compile(r"--(standalone|cpu|multi.gpu|use.(fsdp|deepspeed))")
_VALUE = re.compile(r"[\w.:][\w.:-]*")
_MODULE = ("-m", "--module")


class Access:
    """The folders that a caller may read, and what was made for the caller.

    Attributes:
        roots: The folders, resolved; the first is the one in which jobs run.
    """

    def __init__(self, roots: Sequence[Path], scratch: Path) -> None:
        """Takes the folders, and an empty one for what is made.

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
            raise UsageError(f"there is no answer {name[:200]!r}; {_known(self._answers)}.")
        return self._answers[name]

    def _next(self, kind: str) -> str:
        self._counts[kind] = self._counts.get(kind, 0) + 1
        return f"{kind}{self._counts[kind]}"


def _known(ids: dict[str, Any]) -> str:
    return f"ids so far: {', '.join([*ids][-20:]) or 'none yet'}"


def job_words(command: Sequence[str], access: Access) -> list[str]:
    """Returns the words of a job for ``memprof record``.

    Raises:
        UsageError: It is neither a script, a module nor a launcher, or what it starts is outside the roots.
    """
    words = list(command)
    if words[:1] == ["-m"] and words[1:2] and words[1] not in _LAUNCHERS:
        _check_module(words[1], access)
        return words
    if (start := words[1:2] if words[:1] == ["-m"] else words[:1]) and start[0] in _LAUNCHERS:
        _check_launched(start[0], words[words.index(start[0]) + 1 :], access)
        return words if words[0] == "-m" else ["--", *words]
    if not words or not words[0].endswith(".py"):
        named = repr(words[0])[:200] if words else "an empty command"
        raise UsageError(f"{named} is neither a script (train.py), -m MODULE, nor one of {', '.join(_LAUNCHERS)}.")
    access.read(words[0])
    return [words[0] if not words[0].startswith("-") else f"./{words[0]}", *words[1:]]


def _check_launched(launcher: str, words: Sequence[str], access: Access) -> None:
    """Checks the options of a launcher, and the script or module after them."""
    start = _LAUNCHERS[launcher]
    if tuple(words[: len(start)]) != start:
        raise UsageError(f"{launcher} may only be used as {' '.join((launcher, *start))} [OPTIONS] train.py.")
    rest = iter(words[len(start) :])
    for word in rest:
        if word in _MODULE:
            return _check_module(next(rest, ""), access)
        if not word.startswith("-") and word.endswith(".py"):
            access.read(word)
            return None
        option = _OPTION.fullmatch(word)
        if not (option and (option[option.re.groups] or _VALUE.fullmatch(next(rest, "")))) and not _SWITCH.fullmatch(
            word
        ):
            allowed = "only options that count processes or name their addresses, and a script or -m MODULE"
            raise UsageError(f"{word[:200]!r} may not follow {launcher} here: {allowed}.")
    raise UsageError(f"name the script that {launcher} starts, such as train.py.")


def _check_module(name: str, access: Access) -> None:
    """Checks that Python would find a module below the roots; nothing is imported for that."""
    places: Sequence[str] = [str(access.roots[0]), *sys.path]
    found, parts = None, name.split(".")
    if parts[0] not in sys.builtin_module_names:
        for end in range(1, len(parts) + 2):
            if end > len(parts) and not places:
                break
            found = PathFinder.find_spec(".".join([*parts, "__main__"][:end]), places)
            if found is None:
                break
            places = list(found.submodule_search_locations or ())
    if found is None or not found.origin:
        raise UsageError(f"there is no module {name[:200]!r} below the folders of this server.")
    access.read(found.origin)
