"""The options of a plan search, for every verb that runs one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memprof.errors import UsageError

if TYPE_CHECKING:
    from memprof.planners.search.explore import SearchRequest

F = TypeVar("F", bound=Callable[..., Any])

#: A placeholder peak to validate a budget with before anything is recorded, so that errors surface before the job runs.
_SOME_PEAK_BYTES = 1 << 40


def search_options(command: F) -> F:
    """Adds ``--budget``, ``--machine``, ``--allow``, ``--forbid``, ``--max-slowdown`` and ``--time-limit``.

    The command takes them as ``**asked`` and passes them to ``read_search_request``.
    """
    options = (
        click.option("--budget", metavar="SIZE", help="Maximum peak memory: 24GiB, or 60% of the recorded peak."),
        click.option("--machine", metavar="NAME", help="Budget of this device, such as rtx3090 or a100-80g."),
        click.option("--allow", multiple=True, metavar="POLICY", help="Use only this policy; may be repeated."),
        click.option("--forbid", multiple=True, metavar="POLICY", help="Do not use this policy; may be repeated."),
        click.option("--max-slowdown", metavar="SHARE", help="Maximum increase of the step time: 15%."),
        click.option(
            "--time-limit",
            type=click.FloatRange(min=0.1),
            default=60.0,
            metavar="SECONDS",
            show_default=True,
            help="Time limit of the search.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def read_search_request(
    budget: str | None,
    machine: str | None,
    allow: tuple[str, ...],
    forbid: tuple[str, ...],
    max_slowdown: str | None,
    time_limit: float,
) -> Callable[..., SearchRequest]:
    """Validates the search options.

    Returns:
        A function that makes the search request from the recorded peak in bytes and further fields of a request.

    Raises:
        UsageError: An option is invalid.
        PolicyError: Unknown policy.
    """
    from memprof.machines.budget import parse_budget
    from memprof.machines.catalogue import find_machine
    from memprof.planners.search.explore import SearchRequest
    from memprof.planners.search.workbench import allowed_names
    from memprof.policies.registry import default_policies

    device = find_machine(machine) if machine else None
    names = (_names(allow), _names(forbid))
    slowdown = _share(max_slowdown)

    def search_request(recorded_peak_bytes: int, **more: Any) -> SearchRequest:
        return SearchRequest(
            budget_bytes=parse_budget(budget, recorded_peak_bytes, device),
            allow=names[0],
            forbid=names[1],
            most_slowdown=slowdown,
            time_limit_s=time_limit,
            **more,
        )

    allowed_names(*names, default_policies())
    parse_budget(budget, _SOME_PEAK_BYTES, None if budget is not None and "%" in budget else device)
    return search_request


def _names(given: tuple[str, ...]) -> tuple[str, ...]:
    """Splits names that are given behind one flag, separated by commas."""
    return tuple(name.strip() for text in given for name in text.split(",") if name.strip())


def _share(text: str | None) -> float | None:
    """Parses a fraction: ``15%`` or ``0.15``."""
    if text is None:
        return None
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise UsageError(f"invalid slowdown {text!r}: write a fraction such as 15% or 0.15.")
    return share
