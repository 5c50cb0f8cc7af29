"""Which jobs a caller may start: scripts and modules below the roots, alone or through a known launcher."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder

from memprof.errors import UsageError
from memprof.integrations.mcp_server.access import Access

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
    raise UsageError(f"Name the script that {launcher} starts, such as train.py.")


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
