"""The verb ``memprof record``: runs a training job and records where its memory goes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from memprof.cli.plan_options import chosen_plan, plan_options
from memprof.errors import BadInputError
from memprof.launch.parent import leave_like, record_job
from memprof.launch.ranks import on_ranks, ranks_of
from memprof.launch.settings import Settings, read_project_settings
from memprof.launch.target import CannotStartError, find_target
from memprof.trace.location import is_address

_EPILOG = """\b
Examples:
  memprof record train.py --epochs 1
  memprof record -o run.memprof --steps 5 -- torchrun --nproc-per-node 2 train.py
  memprof record --checkpoint 'layers.*' train.py
  memprof record --shard fsdp --world-size 2 train.py
  memprof record --light train.py
  memprof record --dry-run train.py
"""

#: A dry run's window: the first step makes the optimizer's state, and every later one is like the next.
_DRY_SKIP, _DRY_STEPS = 1, 2


class RecordCommand(click.Command):
    """A command whose own options end where the job begins, and whose defaults a pyproject.toml may set."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Gives click the project's settings: it asks flags first, then MEMPROF_*, then these."""
        given = read_project_settings(Path.cwd())
        if "plan" in given:
            given["plan_path"] = given.pop("plan")
        extra.setdefault("default_map", given)
        return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses memprof's options, and notes whether two dashes stood before the job."""
        given = list(args)
        rest = super().parse_args(ctx, args)
        words = len(ctx.params["words"])
        # Everything after the options is verbatim, so the words are the end of what was given.
        ctx.meta["is_command"] = given[len(given) - words - 1 : len(given) - words] == ["--"]
        return rest


@click.command(
    "record",
    cls=RecordCommand,
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    options_metavar="[OPTIONS]",
    epilog=_EPILOG,
)
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    envvar="MEMPROF_OUTPUT",
    metavar="FILE",
    help="File to write, or an address such as s3://bucket/run.memprof.  [default: <script>.<time>.memprof]",
)
@click.option("-f", "--force", is_flag=True, envvar="MEMPROF_FORCE", help="Replace the file if it exists.")
@click.option("-q", "--quiet", is_flag=True, envvar="MEMPROF_QUIET", help="Say nothing when the job has ended.")
@click.option(
    "--skip",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    envvar="MEMPROF_SKIP",
    metavar="N",
    help="Steps to let pass first.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    envvar="MEMPROF_STEPS",
    metavar="N",
    help="Steps to record.",
)
@click.option("--stop", is_flag=True, envvar="MEMPROF_STOP", help="End the job after the recorded steps.")
@click.option(
    "--light",
    is_flag=True,
    envvar="MEMPROF_LIGHT",
    help="Follow the whole run at a few per cent, instead of recording some steps in full.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    envvar="MEMPROF_DRY_RUN",
    help="Run the job on tensors without memory, in seconds, to learn what it would take.",
)
@plan_options(envvar="MEMPROF_PLAN")
@click.option("-m", "is_module", is_flag=True, help="The job is a Python module, as in python -m.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="{SCRIPT | -m MODULE} [ARGS]... | -- COMMAND...")
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
    is_module: bool,
    plan_path: Path | None,
    **flags: Any,
) -> None:
    """Run a training job, unchanged, and record where its memory goes.

    Everything after the script belongs to the job. The exit status is the job's own; 125 means that the recording
    could not start or the plan does not fit the model, 126 that the job cannot be run, 127 that it was not found.

    With --light, the whole run is followed, so that it can be told afterwards which step was the highest, and where it
    ran out of memory. A plan can be applied as well; --skip, --steps and --stop choose a window, and there is none.

    With --dry-run, nothing is computed from the first model on: tensors have shapes and no memory. The job ends after
    its first steps; what it prints are made-up values, and it writes no checkpoint.

    With --plan, or any of the flags that stand for policies, the job trains under that plan; the flags may be repeated.
    """
    if light and dry_run:
        raise CannotStartError("--light follows a whole run, and --dry-run ends after some steps: leave one out.")
    if light:
        _refuse_window(ctx)
    if dry_run:
        skip, steps = (_given(ctx, name, value) for name, value in (("skip", _DRY_SKIP), ("steps", _DRY_STEPS)))
    target = find_target(words, is_module=is_module, is_command=ctx.meta["is_command"])
    try:
        plan = chosen_plan(plan_path, flags)
    except BadInputError as error:
        raise CannotStartError(str(error)) from None
    if dry_run:
        from memprof.launch.dry_plan import check_plan  # at use: policies are slow to import

        check_plan(plan)
    target = on_ranks(target, ranks_of(plan), os.environ)
    address = output if output is not None and is_address(output) else ""
    settings = Settings(
        # What goes to an address is written here first.
        output=Path(address.rpartition("/")[2]) if address else None if output is None else Path(output),
        address=address,
        force=force,
        quiet=quiet,
        skip=skip,
        steps=steps,
        stop=stop or dry_run,
        light=light,
        dry_run=dry_run,
        plan=plan,
        plan_path=plan_path,
    )
    leave_like(record_job(target, settings))


def _given(ctx: click.Context, name: str, default: int) -> int:
    """Returns a number that the user or the project gives, or else that of a dry run."""
    is_default = ctx.get_parameter_source(name) is ParameterSource.DEFAULT
    value: int = default if is_default else ctx.params[name]
    return value


def _refuse_window(ctx: click.Context) -> None:
    """Refuses a window that is asked for in so many words beside the whole run; one that is a setting is left alone.

    Raises:
        CannotStartError: One is.
    """
    for name in ("skip", "steps", "stop"):
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise CannotStartError(f"--light follows the whole run, so --{name} means nothing with it: leave one out.")
