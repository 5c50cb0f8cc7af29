"""The options of a recording inside another library's training loop."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from memprof.errors import UsageError
from memprof.machines.budget import parse_budget

#: A placeholder peak to validate a budget with before anything is recorded, so that errors surface at once.
_SOME_PEAK_BYTES = 1 << 40


@dataclass(frozen=True)
class CallbackRequest:
    """What to record, and which budget to plan for.

    Attributes:
        path: File to write.
        steps: Steps to record.
        skip: Steps to skip first.
        force: Overwrite the file, and the plan next to it, if they exist.
        budget: Maximum live bytes; "" to search for no plan.
        allow: Names of the allowed policies; none for the default ones.
        forbid: Names of the forbidden policies.
        time_limit_s: Time limit of a search, in seconds.
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
        """Path of the plan, next to the recording."""
        return self.path.with_name("plan.toml")


def make_request(
    path: str | os.PathLike[str],
    *,
    steps: int,
    skip: int,
    force: bool,
    budget: str | int | None,
    allow: tuple[str, ...] | list[str],
    forbid: tuple[str, ...] | list[str],
    time_limit: float,
) -> CallbackRequest:
    """Validates the options before training starts.

    Raises:
        UsageError: An option is invalid.
        PolicyError: Unknown policy.
    """
    if steps < 1 or skip < 0:
        raise UsageError(f"Invalid window: skip={skip}, steps={steps}; skip must be >= 0 and steps >= 1.")
    if not time_limit > 0:
        raise UsageError(f"Invalid time_limit {time_limit}: must be more than 0 seconds.")
    text = "" if budget is None else str(budget)
    if text:
        parse_budget(text, _SOME_PEAK_BYTES)
    elif allow or forbid:
        raise UsageError("allow and forbid choose policies of a plan: add budget='8GiB'.")
    if allow or forbid:
        from memprof.planners.search.workbench import allowed_names

        allowed_names(tuple(allow), tuple(forbid), ())
    return CallbackRequest(Path(path), steps, skip, force, text, tuple(allow), tuple(forbid), time_limit)
