"""The phases of a step: built-in names, and names that a job defines with ``memprof.phase``.

Standard library only: a job may use this when not recording, and without torch.
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

#: Phases detected by the recorder. Their indices are codes in raw recordings: append new ones at the end.
PHASES = ("forward", "backward", "optimizer", "other", "evaluation", "saving", "loading")
#: Phases of a training step; all others are not part of one.
TRAINING = ("forward", "backward", "optimizer")
#: Maximum number of job-defined names in a recording.
MOST_NAMES = 64

#: Other words accepted in place of a phase: names of moments, and of recomputed operators.
_RESERVED = ("peak", "again", "recomputed", "unknown", "none")
_NAME = re.compile(r"[A-Za-z0-9._-](?:[A-Za-z0-9 ._-]{0,62}[A-Za-z0-9._-])?")

_names: ContextVar[tuple[str, ...]] = ContextVar("memprof_phase", default=())
_followers: list[Callable[[], None]] = []


def phase(name: str) -> NamedPhase:
    """Names the code inside a ``with`` statement, or inside a function, as a separate phase.

        with memprof.phase("rollout"):
            collect(environment, policy)

        @memprof.phase("metrics")
        def log_metrics(): ...

    A recording shows the name wherever it shows phases. Backward, the optimizer update, and the forward of that
    backward keep their own phases. When nested, the innermost name counts. No effect without a recording.

    Args:
        name: Up to 64 letters (A to Z), digits, spaces, ``-``, ``_`` and ``.``; not one of memprof's own names.

    Raises:
        ValueError: Invalid name.
    """
    if not isinstance(name, str) or not is_own_name(name) or name.casefold() in (*PHASES, *_RESERVED):
        raise ValueError(
            f"invalid phase name {_shown(name)}: use at most 64 letters (A to Z), digits, spaces, '-', '_' and '.', "
            f"without spaces at the ends, and none of memprof's own names ({', '.join((*PHASES, *_RESERVED))})"
        )
    return NamedPhase(name)


class NamedPhase:
    """Result of `phase`; reentrant, reusable and thread-safe.

    Attributes:
        name: The name.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        """Begins the phase, in this thread or asynchronous task only."""
        if _is_compiling():
            return
        _names.set((*_names.get(), self.name))
        for follower in _followers:
            follower()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the phase; exceptions propagate."""
        if _is_compiling():
            return
        names = _names.get()
        if names[-1:] == (self.name,):  # otherwise torch.compile traced the entry
            _names.set(names[:-1])
        for follower in _followers:
            follower()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Returns a function that runs in this phase.

        Raises:
            TypeError: A generator function or not a function: use a ``with`` statement inside it instead.
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
    """Returns the innermost phase name of this thread or asynchronous task; "" outside."""
    names = _names.get()
    return names[-1] if names else ""


def follow(follower: Callable[[], None]) -> None:
    """Registers a callback for when a thread begins or ends a phase it names, called in that thread."""
    _followers.append(follower)


def unfollow(follower: Callable[[], None]) -> None:
    """Unregisters a callback of `follow`; does nothing if it was not registered."""
    if follower in _followers:
        _followers.remove(follower)


def is_own_name(text: str) -> bool:
    """Returns whether a text is a valid job-defined phase name; the names above are reserved."""
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
    """Whether torch.compile is tracing this, which it cannot trace further: a compiled region is one piece."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "compiler") and torch.compiler.is_compiling()


def _shown(name: object) -> str:
    text = repr(name)
    return text if len(text) <= 70 else f"{text[:67]}..."
