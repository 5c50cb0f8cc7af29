"""What an odd job is, and how its case is declared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.conformance.running import ALL_STEPS, MODES, SCRIPTS, Job

PROGRAMS = Path(__file__).parent / "programs"
#: One thread a process: forked children may use torch then, and losses do not depend on the number of processors.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class OddJob:
    """One job to compare in every mode.

    Attributes:
        name: What it does.
        job: What to run.
        status: The exit status of a plain run, negative for a signal.
        has_window: Recorded in the window of every conformance test; otherwise all its steps are recorded.
        counts_operators: Prints the number of operators or tensors, to which a plan adds its own.
        is_killed_late: It is killed after its training: a dry run has ended in order by then, with its window.
    """

    name: str
    job: Job
    status: int = 0
    has_window: bool = True
    counts_operators: bool = False
    is_killed_late: bool = False

    def options(self, mode: str) -> tuple[str, ...]:
        """Returns the options of ``memprof record`` for a mode."""
        options = MODES[mode]
        if self.has_window or mode == "light":
            return options
        return (*options[: -len(ALL_STEPS)], *ALL_STEPS)


def counting(jobs: Iterable[OddJob]) -> list[OddJob]:
    """Marks jobs that print how many operators ran, or how many tensors there are."""
    return [replace(each, counts_operators=True) for each in jobs]


def killed_late(jobs: Iterable[OddJob]) -> list[OddJob]:
    """Marks jobs that are killed after their training."""
    return [replace(each, is_killed_late=True) for each in jobs]


def odd(program: str, names: str, /, **statuses: int) -> list[OddJob]:
    """Makes a case of each function of a program: those named end with status 0, the others as given."""
    return [_call(program, name, status) for name, status in {**dict.fromkeys(names.split(), 0), **statuses}.items()]


def together(program: str, *groups: str) -> list[OddJob]:
    """Makes a case of each group of functions, which run in turn in one process, every step of theirs recorded."""
    return [_call(program, names, 0, has_window=False) for names in groups]


def shell(name: str, line: str, status: int = 0, stdin: bytes = b"") -> OddJob:
    """Makes the case of a line for ``sh``; see ``Job.shell``."""
    return OddJob(name, Job(shell=line, stdin=stdin, environment=_ENVIRONMENT, programs=(SCRIPTS, PROGRAMS)), status)


def names_of(jobs: Iterable[OddJob]) -> list[str]:
    """Lists what the jobs do, a line for each function of a program."""
    found: list[str] = []
    for each in jobs:
        words = each.job.words
        found += [each.name] if not words else [f"{words[0]} {name}" for name in words[1:]]
    return found


def _call(program: str, names: str, status: int, *, has_window: bool = True) -> OddJob:
    words = (f"{program}.py", *names.split())
    job = Job(words, environment=_ENVIRONMENT, programs=(SCRIPTS, PROGRAMS))
    return OddJob(f"{program} {names}", job, status, has_window)
