"""`memprof largest`: the largest batch, or the longest sequence, that fits a budget under some plan."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memprof.cli.options.command_classes import GroupedCommand, option
from memprof.cli.options.search_options import read_search_request, search_options, step_options
from memprof.cli.options.shared_options import also_option, force_option, no_run_option, write_option
from memprof.errors import UsageError
from memprof.trace.files.place import find_place, refuse_existing

if TYPE_CHECKING:
    from memprof.analysis.plans.basis import Basis
    from memprof.policies.base import Policy


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  memprof largest run.memprof --budget 8GiB
  memprof largest batch8.memprof --also batch16.memprof --device rtx3090 --write plan.toml
  memprof largest length256.memprof --also length512.memprof --sequence --budget 8GiB""",
)
@click.argument("trace", type=click.Path(), metavar="TRACE")
@option(
    "--sequence",
    group="Size",
    is_flag=True,
    help="Find the longest sequence instead of the largest batch; needs --also.",
)
@also_option("Size")
@search_options
@write_option("Write the fastest plan that fits at that size to this TOML file.")
@force_option
@option("--json", "is_json", group="Output", is_flag=True, help="Print everything as JSON: bytes, stable keys.")
@no_run_option
@step_options
def largest(
    trace: str,
    sequence: bool,
    also: tuple[str, ...],
    no_run: bool,
    written: Path | None,
    force: bool,
    is_json: bool,
    step_number: int | None,
    rank: int | None,
    **search_flags: Any,
) -> int:
    """Find the largest batch, or the longest sequence, that fits a budget.

    TRACE is a recording of the unmodified job. With --also, growth is measured between recordings at several sizes;
    from a single recording, the batch is inferred from shapes. A size fits if the upper bound of a plan's peak is
    within the budget. The exit code is 4 if no size fits. As by `memprof predict`, the job is dry-run under policies
    that change kernels if you recorded it here, and these steps are scaled, too.
    """
    if written is not None:
        refuse_existing(find_place(written), force=force)
    if sequence and not also:
        raise UsageError("--sequence needs the job recorded at two lengths: add the other recording with --also TRACE.")
    from memprof.analysis.allocator.uncertainty import room_of
    from memprof.analysis.plans.basis import basis_of
    from memprof.analysis.plans.predict import words_for_record
    from memprof.cli.pages.largest_page import show_largest
    from memprof.cli.verbs.plans.dry_runs import describe_estimate, dry_run_plan
    from memprof.machines.catalogue import find_machine
    from memprof.policies.plan.plan import Plan
    from memprof.trace.store import Trace

    machine = find_machine(search_flags["machine"]) if search_flags["machine"] else None
    search_request = read_search_request(**search_flags)
    paths = (trace, *also)
    opened = [Trace.open(path, rank) for path in paths]
    bases = [basis_of(one, step_number, machine) for one in opened]

    def dry_run(frame: tuple[Policy, ...]) -> tuple[list[Basis], str]:
        if no_run or machine is not None or step_number is not None:
            return bases, describe_estimate(frame)
        found = list(bases)
        for number, (path, one) in enumerate(zip(paths, opened, strict=True)):
            found[number], why = dry_run_plan(Path(path), one.manifest, bases[number], Plan(frame))
            if why:
                return bases, why
        return found, ""

    return show_largest(
        bases,
        str(opened[0].path),
        words_for_record(opened[0].manifest),
        partial(search_request, room=room_of(opened[0])),
        "sequence" if sequence else "batch",
        written,
        dry_run,
        is_json=is_json,
    )
