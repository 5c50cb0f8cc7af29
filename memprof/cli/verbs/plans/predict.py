"""`memprof predict`: a plan's effect on a recorded job's memory and time, before the job runs under it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from memprof.cli.options.command_classes import GroupedCommand, device_option, option
from memprof.cli.options.plan_options import RequestedSize, chosen_plan, plan_options, size_options
from memprof.cli.options.shared_options import json_option, no_run_option, output_option, write_option
from memprof.errors import UsageError
from memprof.trace.files.place import find_place, refuse_existing


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  memprof predict run.memprof --checkpoint 'layers.*' --write plan.toml
  memprof predict run.memprof --plan plan.toml -o predicted.memprof""",
)
@click.argument("trace", type=click.Path(), metavar="TRACE")
@plan_options()
@option(
    "--budget",
    group="Budget and device",
    metavar="SIZE",
    help="Maximum peak of allocated bytes, stored in the plan: 24GiB, or 60% of the recorded peak.  [default: that of "
    "the plan]",
)
@write_option("Write the plan with its prediction and budget to this TOML file.")
@output_option("Write the predicted step to this trace.")
@option("-f", "--force", group="Output", is_flag=True, help="Replace the files if they exist.")
@option(
    "--step",
    "step_number",
    group="Recorded steps",
    type=click.IntRange(min=0),
    metavar="N",
    help="Start from this step.",
)
@device_option("machine", "Give times on this device, such as rtx3090 or a100-80g.", group="Budget and device")
@size_options
@option("--rank", group="Recorded steps", type=click.IntRange(min=0), metavar="N", help="Start from this rank.")
@no_run_option
@json_option
def predict(
    trace: str,
    plan_path: Path | None,
    budget: str | None,
    written: Path | None,
    output: Path | None,
    force: bool,
    step_number: int | None,
    machine: str | None,
    batch: int | None,
    length: int | None,
    lengths: Path | None,
    also: tuple[str, ...],
    rank: int | None,
    no_run: bool,
    is_json: bool,
    **flags: Any,
) -> None:
    """Predict a plan's effect on a recorded job's memory and time.

    TRACE is a recording of the unmodified job. The policy flags may be repeated, and add to the plan. In the folder
    where you recorded the job, as long as its files are unchanged, it is dry-run under policies that change kernels,
    such as --precision; elsewhere these are estimated.
    """
    plan = chosen_plan(plan_path, flags)
    size = RequestedSize(batch, length, lengths, also)
    at = size.option
    if also and not at:
        raise UsageError("--also gives recordings at other sizes, for --at-batch, --at-length or --lengths: add one.")
    if plan is None and at:
        from memprof.policies.plan.plan import Plan

        plan = Plan()  # the effect of the size alone
    if plan is None:
        raise UsageError("nothing to predict: give --plan FILE, or a policy such as --checkpoint 'layers.*'")
    # The plan that was read is overwritten with its prediction; any other existing file is left alone.
    is_own = written is not None and plan_path is not None and written.resolve() == plan_path.resolve()
    for path in (output, None if is_own else written):
        if path is not None:
            refuse_existing(find_place(path), force=force)
    from memprof.analysis.plans.basis import basis_of
    from memprof.analysis.plans.predict import forecast, predicted_trace
    from memprof.cli.verbs.plans.dry_runs import dry_run_plan
    from memprof.machines.budget import parse_budget
    from memprof.machines.catalogue import find_machine
    from memprof.replay.live import live_bytes
    from memprof.trace.store import Trace, write_trace

    device = find_machine(machine) if machine else None
    opened = Trace.open(trace, rank)
    basis = size.basis(basis_of(opened, step_number, device), opened, device, step_number)
    if budget is not None:
        plan = replace(
            plan, budget_bytes=parse_budget(budget, int(live_bytes(basis.step).during.max(initial=0)), device)
        )
    estimated = ""
    if not (no_run or at or device is not None or step_number is not None):
        basis, estimated = dry_run_plan(Path(trace), opened.manifest, basis, plan)
    made = forecast(opened, plan, basis)
    made = replace(made, warnings=(*made.warnings, estimated)) if estimated else made
    if output is not None:
        write_trace(output, [predicted_trace(made)])
    if written is not None:
        from memprof.policies.plan.plan_file import write_plan
        from memprof.trace.files.reading import read_text

        before = read_text(written) if is_own else ""
        write_plan(written, made.plan, before)
    from memprof.analysis.plans.plan_json import forecast_to_json
    from memprof.cli.page import show
    from memprof.cli.pages.plan_page import fill_forecast

    kept = written or (plan_path if not any(flags.values()) else None)
    show(lambda page: fill_forecast(page, made, kept, output), lambda: forecast_to_json(made), is_json=is_json)
