"""`memprof devices`: how many devices a job needs, with its memory divided between them."""

from __future__ import annotations

from pathlib import Path

import click

from memprof.cli.options.search_options import budget_options, read_budget
from memprof.cli.options.shared_options import force_option, json_option, write_option
from memprof.trace.files.place import find_place, refuse_existing


@click.command(
    epilog="""\b
Examples:
  memprof devices run.memprof --budget 8GiB
  memprof devices run.memprof --device rtx3090 --write plan.toml"""
)
@click.argument("trace", type=click.Path(), metavar="TRACE")
@budget_options
@write_option("Write the fastest strategy over the fewest devices that fit to this TOML file.")
@force_option
@click.option("--step", "step_number", type=click.IntRange(min=0), metavar="N", help="Divide this step.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Divide the job of this rank.")
@json_option
def devices(
    trace: str,
    budget: str | None,
    machine: str | None,
    written: Path | None,
    force: bool,
    step_number: int | None,
    rank: int | None,
    is_json: bool,
) -> int:
    """Find how many devices a recorded job needs.

    TRACE is a recording of a single process without sharding. The table shows one rank's peak and step time under data
    parallelism and the three stages of ZeRO, over 2 to 1,024 devices. The exit code is 4 if no number suffices.
    """
    if written is not None:
        refuse_existing(find_place(written), force=force)
    from memprof.analysis.allocator.uncertainty import room_of
    from memprof.analysis.plans.basis import basis_of
    from memprof.analysis.plans.devices import devices_needed
    from memprof.cli.page import show
    from memprof.cli.pages.devices_page import devices_to_json, fill_devices
    from memprof.machines.catalogue import find_machine
    from memprof.machines.outside import NCCL
    from memprof.policies.plan.plan import Plan
    from memprof.policies.plan.plan_file import write_plan
    from memprof.replay.live import live_bytes
    from memprof.trace.store import Trace

    read = read_budget(budget, machine)
    device = find_machine(machine) if machine else None
    opened = Trace.open(trace, rank)
    basis = basis_of(opened, step_number, device)
    communicator = NCCL.most_bytes if machine is not None and budget is None else 0
    budget_bytes = read(int(live_bytes(basis.step).during.max(initial=0)), room=room_of(opened))
    found = devices_needed(basis.step, budget_bytes, device, communicator_bytes=communicator)
    if written is not None and found.needed is not None and not found.fits_alone:
        plan = Plan((found.needed.policy,), budget_bytes=budget_bytes)
        write_plan(written, plan.predict(basis.step, trace=str(opened.path))[0])
    show(
        lambda page: fill_devices(page, found, basis, opened, written), lambda: devices_to_json(found), is_json=is_json
    )
    return 0 if found.fits_alone or found.needed is not None else 4
