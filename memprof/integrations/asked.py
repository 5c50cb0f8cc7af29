"""What a user asks of memprof inside another library's training loop."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from memprof.errors import UsageError
from memprof.machines.budget import parse_budget

#: A peak to read a budget against before any was recorded, so that a mistake in it is told at once.
_SOME_PEAK_BYTES = 1 << 40


@dataclass(frozen=True)
class Asked:
    """What is to be recorded, and what is to be made of it.

    Attributes:
        path: File to write.
        steps: Steps to record.
        skip: Steps to let pass first.
        force: Replace the file, and the plan beside it, if they exist.
        budget: Most bytes that may be allocated at once, "" where no plan is searched for.
        allow: Names of the policies that may be used, none for the usual ones.
        forbid: Names of those that may not.
        time_limit_s: Longest time that a search takes.
    """

    path: Path
    steps: int = 3
    skip: int = 2
    force: bool = False
    budget: str = ""
    allow: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    time_limit_s: float = 30.0

    @property
    def plan_path(self) -> Path:
        """File that the plan is written to, beside the recording."""
        return self.path.with_name("plan.toml")


def ask(
    path: str | os.PathLike[str],
    *,
    steps: int,
    skip: int,
    force: bool,
    budget: str | int | None,
    allow: tuple[str, ...] | list[str],
    forbid: tuple[str, ...] | list[str],
    time_limit: float,
) -> Asked:
    """Checks what is asked for, before any training.

    Raises:
        UsageError: Something makes no sense.
        PolicyError: A policy is named that there is not.
    """
    if steps < 1 or skip < 0:
        raise UsageError(f"A recording needs steps >= 1 and skip >= 0, not steps={steps} and skip={skip}.")
    if not time_limit > 0:
        raise UsageError(f"A search needs time: time_limit is above 0 seconds, not {time_limit}.")
    text = "" if budget is None else str(budget)
    if text:
        parse_budget(text, _SOME_PEAK_BYTES)
    elif allow or forbid:
        raise UsageError("allow and forbid choose policies of a plan: add budget='8GiB'.")
    if allow or forbid:
        from memprof.planners.search.workbench import allowed_names

        allowed_names(tuple(allow), tuple(forbid), ())
    return Asked(Path(path), steps, skip, force, text, tuple(allow), tuple(forbid), time_limit)
