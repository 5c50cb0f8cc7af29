"""What scripts do with a model: functions that take a world and record their results in it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.policies.matrix.world import World


@dataclass(frozen=True)
class Usage:
    """One thing that scripts do.

    Attributes:
        name: Its name.
        group: The file it is in.
        title: What it is, from the docstring.
        run: Does it.
        is_slow: It takes a second or more.
    """

    name: str
    group: str
    title: str
    run: Callable[[World], None]
    is_slow: bool = False


_found: dict[str, Usage] = {}


def usage(run: Callable[[World], None]) -> Callable[[World], None]:
    """Adds a usage."""
    _add(run, is_slow=False)
    return run


def slow_usage(run: Callable[[World], None]) -> Callable[[World], None]:
    """Adds a usage that takes long."""
    _add(run, is_slow=True)
    return run


def _add(run: Callable[[World], None], *, is_slow: bool) -> None:
    title = (run.__doc__ or "").strip().partition("\n")[0].rstrip(".")
    assert run.__name__ not in _found
    _found[run.__name__] = Usage(run.__name__, run.__module__.rpartition(".")[2], title, run, is_slow)


def usages() -> tuple[Usage, ...]:
    """Returns all usages, those of every file of this folder."""
    for path in sorted((Path(__file__).parent / "usages").glob("*.py")):
        importlib.import_module(f"tests.policies.matrix.usages.{path.stem}")
    return tuple(_found.values())
