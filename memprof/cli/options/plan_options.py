"""The plan options: a file, and a short flag for every policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memprof.cli.options.command_classes import option
from memprof.errors import PolicyError
from memprof.policies.registry import policy_types

if TYPE_CHECKING:
    from memprof.policies.base import Policy
    from memprof.policies.plan.plan import Plan

F = TypeVar("F", bound=Callable[..., Any])

_GROUP = "Plan and policies"


def plan_options(*, envvar: str | None = None) -> Callable[[F], F]:
    """Adds ``--plan``, ``--world-size`` and a repeatable flag for each policy to a command.

    The command takes ``plan_path`` and ``**flags``, and passes both to ``chosen_plan``.

    Args:
        envvar: Environment variable with the plan file, used if the option is not given.
    """

    def decorate(command: F) -> F:
        command = option(
            "--world-size",
            group=_GROUP,
            type=click.IntRange(min=1),
            metavar="N",
            help="Number of ranks for --shard, or for the plan's shard.",
        )(command)
        for kind in reversed(policy_types()):
            command = option(
                f"--{kind.name}",
                group=_GROUP,
                multiple=True,
                metavar=kind.flag_example or "SETTINGS",
                help=_sentence(kind.flag_help),
            )(command)
        return option(
            "--plan",
            "plan_path",
            group=_GROUP,
            type=click.Path(path_type=Path),
            envvar=envvar,
            metavar="FILE",
            help="Plan file (TOML); the flags below add policies to it.",
        )(command)

    return decorate


def chosen_plan(plan_path: Path | None, flags: Mapping[str, Any]) -> Plan | None:
    """Reads the plan given by ``--plan`` and the flags.

    Args:
        plan_path: The file, or None.
        flags: The values of each policy's flag, and the world size.

    Returns:
        The plan; None if none is given.

    Raises:
        BadInputError: The file is missing or not valid TOML.
        PolicyError: The file or a flag is invalid.
    """
    world_size = flags.get("world_size")
    more = [
        kind.from_flag(_with_ranks(kind, text, world_size))
        for kind in policy_types()
        for text in flags.get(kind.name, ())
    ]
    if plan_path is None and not more:
        return None
    # Imported here so that recording without a plan does not import the policies.
    from memprof.policies.plan.plan import Plan
    from memprof.policies.plan.plan_file import read_plan

    plan = (read_plan(plan_path) if plan_path is not None else Plan()).with_policies(more)
    return plan if world_size is None else _over(plan, world_size)


def _with_ranks(kind: type[Policy], text: str, world_size: int | None) -> str:
    """Returns a flag's value, with the number of ranks added if it is missing: ``fsdp``, ``3``."""
    has_ranks = any(field.name == "world_size" for field in dataclasses.fields(kind))  # type: ignore[arg-type]
    return f"{text}:{world_size}" if has_ranks and world_size is not None and ":" not in text else text


def _over(plan: Plan, world_size: int) -> Plan:
    """Returns the plan for another number of ranks, without its prediction, which no longer holds.

    Raises:
        PolicyError: No policy of the plan shards over ranks.
    """
    divided = [hasattr(policy, "world_size") for policy in plan.policies]
    if not any(divided):
        raise PolicyError("--world-size needs a plan that shards: add --shard fsdp.")
    changes: dict[str, Any] = {"world_size": world_size}
    policies = tuple(
        dataclasses.replace(policy, **changes) if is_divided else policy  # type: ignore[type-var]
        for policy, is_divided in zip(plan.policies, divided, strict=True)
    )
    return plan if policies == plan.policies else dataclasses.replace(plan, policies=policies, prediction=None)


def _sentence(text: str) -> str:
    text = text.strip().rstrip(".")
    return f"{text[:1].upper()}{text[1:]}." if text else ""
