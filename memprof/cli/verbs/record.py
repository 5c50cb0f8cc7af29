"""The verb ``memprof record``: runs a training job and records where its memory goes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from memprof.cli.options.command_classes import RecordCommand, device_option, option
from memprof.cli.options.plan_options import chosen_plan, plan_options
from memprof.cli.options.shared_options import job_arguments, window_options
from memprof.errors import BadInputError, UsageError
from memprof.harmless import notify
from memprof.launch.parent.settings import Settings, read_dry_window
from memprof.launch.parent.target import CannotStartError, check_ranks, find_target, on_ranks, ranks_of
from memprof.machines.card import find_card
from memprof.trace.files.reading import is_address

if TYPE_CHECKING:
    from memprof.policies.plan.plan import Plan

_EPILOG = """\b
Examples:
  memprof record train.py --epochs 1
  memprof record -o run.memprof --steps 5 -- torchrun --nproc-per-node 2 train.py
  memprof record --checkpoint 'layers.*' train.py
  memprof record --shard fsdp --world-size 2 train.py
  memprof record --light train.py
  memprof record --dry-run train.py
  memprof record --device h100-80g --ranks 64 --nodes 8 train.py
"""


@click.command(
    "record",
    cls=RecordCommand,
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    options_metavar="[OPTIONS]",
    epilog=_EPILOG,
)
@option(
    "-o",
    "--output",
    group="Output",
    type=click.Path(),
    envvar="MEMPROF_OUTPUT",
    metavar="FILE",
    help="File to write, or an address such as s3://bucket/run.memprof.  [default: <script>.<time>.memprof]",
)
@option("-f", "--force", group="Output", is_flag=True, envvar="MEMPROF_FORCE", help="Replace the file if it exists.")
@option(
    "-q", "--quiet", group="Output", is_flag=True, envvar="MEMPROF_QUIET", help="Print no summary when the job ends."
)
@window_options(has_variables=True)
@option(
    "--stop", group="Recorded steps", is_flag=True, envvar="MEMPROF_STOP", help="End the job after the recorded steps."
)
@option(
    "--light",
    group="Recorded steps",
    is_flag=True,
    envvar="MEMPROF_LIGHT",
    help="Follow the whole run with a few percent overhead, instead of recording some steps in full.",
)
@option(
    "--dry-run/--no-dry-run",
    group="Dry run",
    envvar="MEMPROF_DRY_RUN",
    help="Run the job on tensors without memory, in seconds, to measure what it would need.",
)
@option(
    "--whole",
    group="Dry run",
    is_flag=True,
    envvar="MEMPROF_WHOLE",
    help="With --dry-run: go on through the whole loop, for the peaks of evaluations, saves and rare updates.",
)
@device_option(
    "device",
    "Dry-run on this GPU, such as h100-80g or rtx4090, which is simulated; none is needed.",
    group="Dry run",
    default="",
    envvar="MEMPROF_DEVICE",
)
@option(
    "--strict",
    group="Dry run",
    is_flag=True,
    envvar="MEMPROF_STRICT",
    help="With --device: raise torch's out-of-memory error where the GPU is full, for jobs that catch it.",
)
@option(
    "--ranks",
    group="Dry run",
    type=click.IntRange(min=1),
    envvar="MEMPROF_RANKS",
    metavar="N",
    help="With --dry-run: ranks of a distributed script; one process is run for each distinct role.",
)
@option(
    "--nodes",
    group="Dry run",
    type=click.IntRange(min=1),
    envvar="MEMPROF_NODES",
    metavar="N",
    help="With --ranks: number of machines, each with the same number of ranks.  [default: 1]",
)
@option(
    "--expert-load",
    group="Dry run",
    type=click.FloatRange(min=1.0),
    envvar="MEMPROF_EXPERT_LOAD",
    metavar="X",
    help="With --dry-run: tokens that the experts of a rank receive, as a multiple of an equal share.  [default: 1.0]",
)
@option(
    "--values-from",
    group="Dry run",
    type=click.Path(path_type=Path),
    envvar="MEMPROF_VALUES_FROM",
    metavar="FILE",
    help="With --dry-run: replay the values that the job read in this recording, instead of placeholders.",
)
@option(
    "--keep-arguments",
    group="Output",
    is_flag=True,
    envvar="MEMPROF_KEEP_ARGUMENTS",
    help="Write the job's arguments unmasked, passwords and tokens included.",
)
@option(
    "--budget",
    group="Budget",
    envvar="MEMPROF_BUDGET",
    metavar="SIZE",
    help="Maximum peak of allocated bytes, compared with the measured peak: 24GiB.  [default: the plan's]",
)
@option(
    "--fail-over-budget",
    group="Budget",
    is_flag=True,
    envvar="MEMPROF_FAIL_OVER_BUDGET",
    help="If the job succeeds, exit with 4 over the budget, 3 if that was not measured.",
)
@plan_options(envvar="MEMPROF_PLAN")
@job_arguments
@click.pass_context
def record(
    ctx: click.Context,
    /,
    words: tuple[str, ...],
    output: str | None,
    force: bool,
    quiet: bool,
    skip: int,
    steps: int,
    stop: bool,
    light: bool,
    dry_run: bool,
    whole: bool,
    device: str,
    strict: bool,
    ranks: int | None,
    nodes: int | None,
    expert_load: float | None,
    values_from: Path | None,
    keep_arguments: bool,
    budget: str | None,
    fail_over_budget: bool,
    is_module: bool,
    plan_path: Path | None,
    **flags: Any,
) -> None:
    """Run a training job, unchanged, and record where its memory goes.

    Everything after the script belongs to the job. The exit status is the job's own, or 3 if that is 0 and nothing was
    recorded; 125 means that the recording could not start or the plan does not fit the model, 126 that the job cannot
    be run, 127 that it was not found.

    With --light, the whole run is followed, to report which step peaked highest, and where it ran out of memory. A plan
    can be applied as well; --skip, --steps and --stop do not apply: --light has no window.

    With --dry-run, nothing is computed from the first model on: tensors have shapes and no memory. The job ends after
    its first steps; the values it prints are placeholders, and it writes no checkpoint.

    With --whole, it goes on to the end of the loop, or for 2.7 times the time of its first steps; calls and
    updates that repeat earlier ones are not run again.

    With --device, which implies --dry-run, a GPU that need not be present is simulated, on which torch behaves as on a
    real one.

    With --ranks, a dry run covers the ranks of a distributed job: of ranks that do the same, one is run.

    With --plan, or any of the policy flags, the job trains under that plan; the flags may be repeated.

    With a budget, from the plan or --budget, the highest recorded step is compared with it. --fail-over-budget is for
    CI: the exit status is then 4 if the job succeeded and that step is over the budget.
    """
    # A variable or a project's setting names the device of dry runs; it makes none of a training.
    has_device = bool(device) and ctx.get_parameter_source("device") is ParameterSource.COMMANDLINE
    if has_device and not dry_run and _is_typed(ctx, "dry_run"):
        raise CannotStartError(f"--device {device} is the GPU that a dry run simulates: leave out --no-dry-run.")
    dry_run = dry_run or has_device
    if light and dry_run:
        light, dry_run = _is_typed(ctx, "light"), has_device or _is_typed(ctx, "dry_run")  # these override settings
        if light == dry_run:
            raise CannotStartError(
                "--light follows a whole run, and a dry run (--dry-run, --device) ends after some steps: leave one out."
            )
    if light:
        for name in ("skip", "steps", "stop"):
            if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise CannotStartError(f"--{name} does not apply: --light has no window. Leave one of them out.")
    device = _checked_device(device) if dry_run and device else ""  # a project's is for its dry runs
    if strict and not device and _is_typed(ctx, "strict"):
        raise CannotStartError("--strict is about a full GPU: name the one to simulate, --device rtx4090.")
    if whole and not dry_run and _is_typed(ctx, "whole"):
        raise CannotStartError(
            "--whole is for dry runs, which skip repeated work: add --dry-run, or follow a real run with --light."
        )
    if expert_load is not None and not dry_run and _is_typed(ctx, "expert_load"):
        raise CannotStartError("--expert-load is for dry runs, which compute no routing: add --dry-run.")
    if values_from is not None and not dry_run and _is_typed(ctx, "values_from"):
        raise CannotStartError("--values-from is for dry runs, which compute no values: add --dry-run.")
    if dry_run:
        window = read_dry_window(Path.cwd())
        skip, steps = _given(ctx, "skip", window.skip), _given(ctx, "steps", window.steps)
    try:
        target = find_target(words, is_module=is_module, is_command=ctx.meta["is_command"])
    except OSError as error:  # for example, a name that is too long
        raise CannotStartError(f"{words[0][:80]} cannot be looked up: {error.strerror or error}.") from None
    try:
        plan = chosen_plan(plan_path, flags)
    except BadInputError as error:
        raise CannotStartError(str(error)) from None
    is_other = plan is not None or ranks is not None or nodes is not None
    whole = whole and dry_run and (_is_typed(ctx, "whole") or not is_other)  # a variable is for those it applies to
    if whole:
        _refuse_with_whole(ctx, has_plan=plan is not None, has_ranks=ranks is not None or nodes is not None)
    budget_bytes = _budget_of(budget, plan)
    if plan is not None and plan.budget_bytes != budget_bytes:
        plan = replace(plan, budget_bytes=budget_bytes)
    if fail_over_budget and budget_bytes is None:
        if _is_typed(ctx, "fail_over_budget"):
            raise UsageError("--fail-over-budget needs a budget: add --budget 24GiB, or write one into the plan.")
        fail_over_budget = False  # a project setting, meant for runs that have a budget
    if dry_run:
        from memprof.launch.dry.dry_job import check_plan  # imported here: policies are slow to import

        check_plan(plan)
    if not dry_run:  # a dry run has a single rank, with the others simulated
        target = on_ranks(target, ranks_of(plan), os.environ)
    if ranks is not None or nodes is not None:
        check_ranks(target, ranks or 0, nodes or 1, ranks_of(plan), os.environ, dry_run=dry_run)
    address = output if output is not None and is_address(output) else ""
    settings = Settings(
        # A recording for a remote address is written here first.
        output=Path(address.rpartition("/")[2]) if address else None if output is None else Path(output),
        address=address,
        force=force,
        quiet=quiet,
        skip=skip,
        steps=steps,
        stop=stop or dry_run,
        goes_on=not (stop or light or dry_run or _has_window(ctx)),
        light=light,
        dry_run=dry_run,
        whole=whole,
        device=device,
        strict=strict and bool(device),
        read_values=_values_from(values_from) if dry_run and values_from is not None else "",
        ranks=ranks or 0,
        nodes=nodes or 1,
        expert_load=expert_load or 1.0,
        plan=plan,
        plan_path=plan_path,
        keep_arguments=keep_arguments,
        budget_bytes=budget_bytes,
        fail_over_budget=fail_over_budget,
    )
    from memprof.launch.parent.parent import leave_like, record_job  # watches the job; not needed for the help

    try:
        misplaced, is_ours = ctx.meta["misplaced"]
        if is_ours:
            notify(misplaced)
        status = record_job(target, settings)
        if misplaced and not is_ours and status == UsageError.exit_code:  # argparse ends so at an unknown option
            notify(misplaced)
    except OSError as error:  # raised only if the job could not run
        raise CannotStartError(f"{error.filename or target.name} cannot be used: {error.strerror or error}.") from None
    leave_like(status)


def _budget_of(text: str | None, plan: Plan | None) -> int | None:
    """Returns the given budget, or else the plan's; a percentage refers to the peak the plan was made from.

    Raises:
        UsageError: The text is not a budget.
    """
    if text is None:
        return None if plan is None else plan.budget_bytes
    from memprof.machines.budget import parse_budget

    known = 0 if plan is None or plan.prediction is None else plan.prediction.recorded_peak_bytes
    if "%" in text and not known:
        raise UsageError(f"--budget {text} is a share of a recorded peak, and none is known here: write a size, 24GiB.")
    return parse_budget(text, known)


def _values_from(recording: Path) -> str:
    """Returns the values that a recording has for a dry run.

    Raises:
        CannotStartError: It cannot be read, or has none.
    """
    from memprof.launch.dry.dry_job import read_values_of

    values = read_values_of(recording)
    if not values:
        raise CannotStartError(
            f"{recording} has no values to replay: it is no recording of a real run, was made by an older memprof, or "
            "its job reads none."
        )
    return values


def _given(ctx: click.Context, name: str, default: int) -> int:
    """Returns a number set by the user, or else a dry run's default; the project's settings are for real runs."""
    value: int = ctx.params[name] if _is_typed(ctx, name) else default
    return value


def _checked_device(name: str) -> str:
    """Returns the name of a device that a dry run can simulate.

    Raises:
        CannotStartError: It is unknown.
    """
    try:
        find_card(name)
    except UsageError as error:
        raise CannotStartError(str(error)) from None
    return name


def _is_typed(ctx: click.Context, name: str) -> bool:
    """Returns whether an option is set by a flag or a variable, rather than by project settings or a default."""
    return ctx.get_parameter_source(name) in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


def _has_window(ctx: click.Context) -> bool:
    """Returns whether the user or the project's settings choose the steps to record."""
    return any(ctx.get_parameter_source(name) is not ParameterSource.DEFAULT for name in ("skip", "steps"))


def _refuse_with_whole(ctx: click.Context, *, has_plan: bool, has_ranks: bool) -> None:
    """Rejects what does not go with --whole; the project's steps are ignored.

    Raises:
        CannotStartError: Steps, a plan or ranks are given.
    """
    for name in ("skip", "steps"):
        if _is_typed(ctx, name):
            raise CannotStartError(f"--{name} does not apply: --whole has no window. Leave one of them out.")
    if has_plan or has_ranks:
        given = "a plan" if has_plan else "ranks"
        raise CannotStartError(f"--whole does not skip calls correctly under {given} yet: leave one of them out.")
