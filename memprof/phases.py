"""The phases of a step: their names, and those that a job names itself with ``memprof.phase``.

Standard library only: a job may use this where nothing is recorded, and where torch is not installed.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

#: Phases that the recorder tells by itself. Their places are codes in raw recordings: new ones go to the end.
PHASES = ("forward", "backward", "optimizer", "other", "evaluation", "saving", "loading")
#: Those of them that make up a training step; the others, and those that a job names, are not part of one.
TRAINING = ("forward", "backward", "optimizer")
#: Most names of its own that a recording holds.
MOST_NAMES = 64

#: What else may be written in place of a phase: names of moments, and of operators that run again.
_RESERVED = ("peak", "again", "recomputed", "unknown", "none")
_NAME = re.compile(r"[A-Za-z0-9._-](?:[A-Za-z0-9 ._-]{0,62}[A-Za-z0-9._-])?")

_names: ContextVar[tuple[str, ...]] = ContextVar("memprof_phase", default=())
_followers: list[Callable[[], None]] = []


def phase(name: str) -> NamedPhase:
    """Names what runs inside a ``with`` statement, or inside a function, as a phase of its own.

        with memprof.phase("rollout"):
            collect(environment, policy)

        @memprof.phase("metrics")
        def log_metrics(): ...

    A recording shows the name wherever it shows phases. Backward, an optimizer's update, and the forward that a
    backward belongs to keep their own phases. Inside another, the inner name counts. Without a recording it does
    nothing.

    Args:
        name: At most 64 letters (A to Z), digits, spaces, ``-``, ``_`` and ``.``; none of memprof's own names.

    Raises:
        ValueError: The name is none of these.
    """
    if not isinstance(name, str) or not is_own_name(name) or name.casefold() in (*PHASES, *_RESERVED):
        raise ValueError(
            f"invalid phase name {_shown(name)}: use at most 64 letters (A to Z), digits, spaces, '-', '_' and '.', "
            f"without spaces at the ends, and none of memprof's own names ({', '.join((*PHASES, *_RESERVED))})"
        )
    return NamedPhase(name)


class NamedPhase:
    """What `phase` returns; it can be entered any number of times, also within itself and in several threads.

    Attributes:
        name: The name.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        """Takes a name that was checked."""
        self.name = name

    def __enter__(self) -> None:
        """Begins the phase, in this thread or asynchronous task alone."""
        if _is_compiling():
            return
        _names.set((*_names.get(), self.name))
        for follower in _followers:
            follower()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends it; an error goes on as it is."""
        if _is_compiling():
            return
        names = _names.get()
        if names[-1:] == (self.name,):  # else torch.compile read where it began
            _names.set(names[:-1])
        for follower in _followers:
            follower()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Returns a function that runs in this phase.

        Raises:
            TypeError: It is a generator function, or none: name the phase inside it, with a ``with`` statement.
        """
        is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        if is_generator or not callable(function) or inspect.isclass(function):
            raise TypeError(
                f"memprof.phase({self.name!r}) decorates functions only, and no generators: "
                "use 'with memprof.phase(...)' inside"
            )
        if inspect.iscoroutinefunction(function):
            routine: Callable[..., Any] = function

            @wraps(function)
            async def run_later(*args: P.args, **kwargs: P.kwargs) -> Any:
                with self:
                    return await routine(*args, **kwargs)

            return run_later  # type: ignore[return-value]  # R is the coroutine's type

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return run


def named_phase() -> str:
    """Returns the innermost name that this thread, or asynchronous task, runs under; "" outside."""
    names = _names.get()
    return names[-1] if names else ""


def follow(follower: Callable[[], None]) -> None:
    """Has a function called whenever a thread begins or ends a phase that it names, in that thread."""
    _followers.append(follower)


def unfollow(follower: Callable[[], None]) -> None:
    """Takes a function of `follow` back; does nothing where it was not given."""
    if follower in _followers:
        _followers.remove(follower)


def is_own_name(text: str) -> bool:
    """Tells whether a text can be a job's name for a phase; the names above are reserved."""
    return _NAME.fullmatch(text) is not None and text not in _RESERVED


def in_order(names: Iterable[str]) -> list[str]:
    """Lists phases once each: training in a step's order, evaluation, saving, loading, the job's own, ``other``."""
    found = set(names) - {""}
    known = [*TRAINING, *(name for name in PHASES if name not in (*TRAINING, "other"))]
    return [
        *(name for name in known if name in found),
        *sorted(found - set(PHASES)),
        *(["other"] if "other" in found else []),
    ]


def _is_compiling() -> bool:
    """Whether torch.compile reads this, which cannot follow it further: a compiled region is one piece."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "compiler") and torch.compiler.is_compiling()


def _shown(name: object) -> str:
    text = repr(name)
    return text if len(text) <= 70 else f"{text[:67]}..."
