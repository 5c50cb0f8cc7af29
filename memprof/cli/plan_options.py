"""The options by which a plan is given: a file, and a short flag for every policy there is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memprof.policies.registry import policy_types

if TYPE_CHECKING:
    from memprof.policies.plan import Plan

F = TypeVar("F", bound=Callable[..., Any])


def plan_options(*, envvar: str | None = None) -> Callable[[F], F]:
    """Gives a command ``--plan`` and a flag for each policy, which may be repeated.

    The command takes ``plan_path`` and ``**flags``, and hands both to ``chosen_plan``.

    Args:
        envvar: Variable that names the file where the option is left out.
    """

    def decorate(command: F) -> F:
        for kind in reversed(policy_types()):
            command = click.option(
                f"--{kind.name}",
                multiple=True,
                metavar=kind.flag_example or "SETTINGS",
                help=_sentence(kind.flag_help),
            )(command)
        return click.option(
            "--plan",
            "plan_path",
            type=click.Path(path_type=Path),
            envvar=envvar,
            metavar="FILE",
            help="Policies from a TOML file; the flags below add to them.",
        )(command)

    return decorate


def chosen_plan(plan_path: Path | None, flags: Mapping[str, tuple[str, ...]]) -> Plan | None:
    """Reads what ``--plan`` and the flags ask for.

    Args:
        plan_path: The file, or None.
        flags: What was given of each policy's flag.

    Returns:
        The plan, None where nothing was asked for.

    Raises:
        BadInputError: The file is missing or no TOML.
        PolicyError: Something in the file or a flag makes no sense.
    """
    more = [kind.from_flag(text) for kind in policy_types() for text in flags.get(kind.name, ())]
    if plan_path is None and not more:
        return None
    # Here because a recording without a plan must not import what a plan needs.
    from memprof.policies.plan import Plan
    from memprof.policies.plan_file import read_plan

    plan = read_plan(plan_path) if plan_path is not None else Plan()
    return plan.with_policies(more)


def _sentence(text: str) -> str:
    text = text.strip().rstrip(".")
    return f"{text[:1].upper()}{text[1:]}." if text else ""
