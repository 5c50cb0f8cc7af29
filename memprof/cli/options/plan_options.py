"""The options that say what is predicted: a plan, and another size than was recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memprof.cli.options.command_classes import add_all, option
from memprof.cli.options.shared_options import also_option
from memprof.errors import PolicyError, UsageError
from memprof.policies.registry import policy_types

if TYPE_CHECKING:
    from memprof.analysis.plans.basis import Basis
    from memprof.machines.catalogue import Accelerator
    from memprof.policies.base import Policy
    from memprof.policies.plan.plan import Plan
    from memprof.trace.store import Trace

F = TypeVar("F", bound=Callable[..., Any])
_GROUP = "Plan and policies"


def plan_options(*, envvar: str | None = None) -> Callable[[F], F]:
    """Adds ``--plan``, ``--world-size`` and a repeatable flag for each policy to a command.

    The command takes ``plan_path`` and ``**flags``, and passes both to ``chosen_plan``.

    Args:
        envvar: Environment variable with the plan file, used if the option is not given.
    """
    policies = (
        option(
            f"--{kind.name}",
            group=_GROUP,
            multiple=True,
            metavar=kind.flag_example or "SETTINGS",
            help=_sentence(kind.flag_help),
        )
        for kind in policy_types()
    )
    return add_all(
        option(
            "--plan",
            "plan_path",
            group=_GROUP,
            type=click.Path(path_type=Path),
            envvar=envvar,
            metavar="FILE",
            help="Plan file (TOML); the flags below add policies to it.",
        ),
        *policies,
        option(
            "--world-size",
            group=_GROUP,
            type=click.IntRange(min=1),
            metavar="N",
            help="Number of ranks for --shard, or for the plan's shard.",
        ),
    )


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


def size_options(command: F) -> F:
    """Adds ``--at-batch``, ``--at-length``, ``--lengths`` and ``--also`` to a command.

    The command takes ``batch``, ``length``, ``lengths`` and ``also``, and builds an ``RequestedSize`` from them.
    """
    return add_all(
        option(
            "--at-batch",
            "batch",
            group="Another size",
            type=click.IntRange(min=1),
            metavar="N",
            help="Plan for this batch size.",
        ),
        option(
            "--at-length",
            "length",
            group="Another size",
            type=click.IntRange(min=1),
            metavar="N",
            help="Plan for sequences of this length, from a recording with several lengths.",
        ),
        option(
            "--lengths",
            group="Another size",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Plan for a data set's longest batch: a file with one length, or one batch's lengths, per line.",
        ),
        also_option("Another size"),
    )(command)


@dataclass(frozen=True)
class RequestedSize:
    """The size to plan for.

    Attributes:
        batch: Value of ``--at-batch``.
        length: Value of ``--at-length``.
        lengths: Value of ``--lengths``.
        also: Further recordings of the job at other sizes.
    """

    batch: int | None
    length: int | None
    lengths: Path | None
    also: tuple[str, ...]

    @property
    def option(self) -> str:
        """The option that selects another size, "" if none does.

        Raises:
            UsageError: More than one does.
        """
        given = {"--at-batch": self.batch, "--at-length": self.length, "--lengths": self.lengths}
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise UsageError(f"{' and '.join(names)} are mutually exclusive: give only one.")
        return names[0] if names else ""

    def basis(self, basis: Basis, opened: Trace, machine: Accelerator | None, step_number: int | None) -> Basis:
        """Returns the steps to plan for, scaled to the requested size.

        Args:
            basis: The steps as recorded.
            opened: The recording they are from.
            machine: The target device; None for the recording's own.
            step_number: The only step to scale; None for all.

        Raises:
            BadInputError: A file is missing, damaged, or contains no lengths.
            InconclusiveError: The recordings do not determine the step at that size.
            UsageError: A single step is selected; one step does not determine how memory grows with length.
        """
        if not self.option:
            return basis
        if step_number is not None and self.batch is None:
            raise UsageError(
                f"{self.option} needs all steps of the recording, at their several lengths: remove --step."
            )
        from memprof.analysis.allocator.allocator_report import settings_in_force
        from memprof.analysis.plans.another_size import at_batch, at_length, at_lengths
        from memprof.analysis.plans.basis import whole_steps
        from memprof.analysis.plans.length_mix import read_lengths
        from memprof.trace.store import Trace

        every = None if self.lengths is None else read_lengths(self.lengths)
        own = whole_steps(opened, machine) if step_number is None else (basis.step,)
        runs = [own, *(whole_steps(Trace.open(path), machine) for path in self.also)]
        if every is not None:
            return at_lengths(basis, runs, every, settings_in_force(opened.manifest, basis.step).settings)
        if self.length is not None:
            return at_length(basis, runs, self.length)
        return basis if self.batch is None else at_batch(basis, runs, self.batch)
