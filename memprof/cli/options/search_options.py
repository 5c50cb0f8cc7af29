"""The options of a plan search, for every verb that runs one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memprof.cli.options.command_classes import add_all, device_option, option
from memprof.errors import UsageError

if TYPE_CHECKING:
    from memprof.machines.budget import ReadBudget, Room
    from memprof.planners.search.request import MakeSearchRequest, SearchRequest

F = TypeVar("F", bound=Callable[..., Any])

#: A placeholder peak to validate a budget with before anything is recorded, so that errors surface before the job runs.
_SOME_PEAK_BYTES = 1 << 40


def budget_options(command: F) -> F:
    """Adds ``--budget`` and ``--device``, which the command passes to ``read_budget``."""
    budget = option(
        "--budget",
        group="Budget and device",
        metavar="SIZE",
        help="Maximum peak of allocated bytes: 24GiB, or 60% of the recorded peak; for plans also of host memory: of "
        "all processes 24GiB,host=64GiB, of pinned copies 24GiB,pinned=8GiB, or one memory for both "
        "unified=96GiB. For a whole device, use --device.",
    )
    words = "Budget of this device, such as rtx3090 or a100-80g, without what its context and workspaces may take."
    machine = device_option("machine", words, group="Budget and device")
    return budget(machine(command))


def step_options(command: F) -> F:
    """Adds ``--step`` and ``--rank``, the step to plan for; the command takes ``step_number`` and ``rank``."""
    number = click.IntRange(min=0)
    step = option("--step", "step_number", group="Recorded steps", type=number, metavar="N", help="Plan for this step.")
    rank = option("--rank", group="Recorded steps", type=number, metavar="N", help="Plan for this rank.")
    return step(rank(command))


def search_options(command: F) -> F:
    """Adds ``--budget``, ``--device``, ``--allow``, ``--forbid``, ``--max-slowdown`` and ``--time-limit``.

    The command takes them as ``**search_flags`` and passes them to ``read_search_request``.
    """
    return add_all(
        budget_options,
        option(
            "--allow", group="Search", multiple=True, metavar="POLICY", help="Use only this policy; may be repeated."
        ),
        option(
            "--forbid", group="Search", multiple=True, metavar="POLICY", help="Do not use this policy; may be repeated."
        ),
        option("--max-slowdown", group="Search", metavar="SHARE", help="Maximum increase of the step time: 15%."),
        option(
            "--time-limit",
            group="Search",
            type=click.FloatRange(min=0.1),
            default=60.0,
            metavar="SECONDS",
            show_default=True,
            help="Time limit of the search.",
        ),
    )(command)


def read_budget(budget: str | None, machine: str | None) -> ReadBudget:
    """Validates the budget options.

    Returns:
        The budget, still to be read for a recording.

    Raises:
        UsageError: The budget is invalid or missing, or the device is unknown.
    """
    from memprof.machines.budget import no_room, parse_budget
    from memprof.machines.catalogue import find_machine

    device = find_machine(machine) if machine else None
    parse_budget(budget, _SOME_PEAK_BYTES, None if budget is not None and "%" in budget else device)

    def budget_of(recorded_peak_bytes: int, room: Room = no_room) -> int:
        return parse_budget(budget, recorded_peak_bytes, device, room)

    return budget_of


def read_search_request(
    budget: str | None,
    machine: str | None,
    allow: tuple[str, ...],
    forbid: tuple[str, ...],
    max_slowdown: str | None,
    time_limit: float,
) -> MakeSearchRequest:
    """Validates the search options.

    Returns:
        What makes the search request for a recording.

    Raises:
        UsageError: An option is invalid.
        PolicyError: Unknown policy.
    """
    from memprof.machines.budget import no_room, split_budget
    from memprof.planners.search.request import SearchRequest
    from memprof.planners.search.workbench import allowed_names
    from memprof.policies.registry import default_policies

    names = (_names(allow), _names(forbid))
    slowdown = _share(max_slowdown)

    def search_request(recorded_peak_bytes: int, room: Room = no_room, **more: Any) -> SearchRequest:
        return SearchRequest(
            budget_bytes=budget_of(recorded_peak_bytes, room),
            room_bytes=room() if device_budget is None else 0,
            allow=names[0],
            forbid=names[1],
            most_slowdown=slowdown,
            time_limit_s=time_limit,
            most_host_bytes=min((one for one in (host.job_bytes, host.pinned_bytes) if one is not None), default=None),
            host=host,
            is_unified=host.is_unified,
            counts_reserved=machine is not None,
            **more,
        )

    allowed_names(*names, default_policies())
    device_budget, host = split_budget(budget)
    budget_of = read_budget(device_budget, machine)
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
