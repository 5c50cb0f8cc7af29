"""`memprof largest`: the largest batch, or the longest sequence, that fits a budget under some plan."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from memprof.cli.options.grouped import GroupedCommand, option
from memprof.cli.options.search_options import read_search_request, search_options, step_options
from memprof.cli.options.shared_options import also_option, force_option, write_option
from memprof.errors import UsageError
from memprof.trace.files.place import find_place, refuse_existing


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  memprof largest run.memprof --budget 8GiB
  memprof largest batch8.memprof --also batch16.memprof --machine rtx3090 --write plan.toml
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
@step_options
def largest(
    trace: str,
    sequence: bool,
    also: tuple[str, ...],
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
    within the budget. The exit code is 4 if no size fits.
    """
    if written is not None:
        refuse_existing(find_place(written), force=force)
    if sequence and not also:
        raise UsageError("--sequence needs the job recorded at two lengths: add the other recording with --also TRACE.")
    from memprof.analysis.allocator.beyond_tensors import room_of
    from memprof.analysis.plans.basis import basis_of
    from memprof.cli.pages.largest_page import show_largest
    from memprof.machines.catalogue import find_machine
    from memprof.trace.store import Trace

    machine = find_machine(search_flags["machine"]) if search_flags["machine"] else None
    search_request = read_search_request(**search_flags)
    opened = [Trace.open(path, rank) for path in (trace, *also)]
    return show_largest(
        [basis_of(one, step_number, machine) for one in opened],
        str(opened[0].path),
        partial(search_request, room=room_of(opened[0])),
        "sequence" if sequence else "batch",
        written,
        is_json=is_json,
    )
