"""The options that plan for another size than was recorded: a batch, a length, a distribution of lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memprof.cli.options.command_classes import option
from memprof.cli.options.shared_options import also_option
from memprof.errors import UsageError

if TYPE_CHECKING:
    from memprof.analysis.plans.basis import Basis
    from memprof.machines.catalogue import Accelerator
    from memprof.trace.store import Trace

F = TypeVar("F", bound=Callable[..., Any])


def size_options(command: F) -> F:
    """Adds ``--at-batch``, ``--at-length``, ``--lengths`` and ``--also`` to a command.

    The command takes ``batch``, ``length``, ``lengths`` and ``also``, and builds an ``RequestedSize`` from them.
    """
    options = (
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
    )
    for add in reversed(options):
        command = add(command)
    return command


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
