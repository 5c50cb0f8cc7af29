"""Limits under which cases run, and their allowed outcomes."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memprof.errors import MemprofError

#: Memory that the cases may take beyond what the process has.
_MORE_BYTES = 2 << 30


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Lets the process take no more than 2 GiB of address space beyond what it has; more is a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MORE_BYTES if pages else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def outcome(case: str, read: Callable[[], Any]) -> str:
    """Runs one case.

    Args:
        case: Name of the case, for the failure message.
        read: Reads the damaged input.

    Returns:
        "fine", or the sentence.

    Raises:
        AssertionError: It ends in anything other than a result or one message.
    """
    try:
        read()
    except MemprofError as error:
        sentence = str(error)
        assert sentence, case
        assert "\n" not in sentence, (case, sentence)
        return sentence
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    return "fine"
