"""The verb ``memprof record``: runs a training job and records where its memory goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from memprof.cli.plan_options import chosen_plan, plan_options
from memprof.errors import BadInputError
from memprof.launch.parent import leave_like, record_job
from memprof.launch.settings import Settings, read_project_settings
from memprof.launch.target import CannotStartError, find_target

_EPILOG = """\b
Examples:
  memprof record train.py --epochs 1
  memprof record -o run.memprof --steps 5 -- torchrun --nproc-per-node 2 train.py
  memprof record --checkpoint 'layers.*' train.py
"""


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
    type=click.Path(path_type=Path),
    envvar="MEMPROF_OUTPUT",
    metavar="FILE",
    help="File to write.  [default: <script>.<time>.memprof]",
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
@plan_options(envvar="MEMPROF_PLAN")
@click.option("-m", "is_module", is_flag=True, help="The job is a Python module, as in python -m.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="{SCRIPT | -m MODULE} [ARGS]... | -- COMMAND...")
@click.pass_context
def record(
    ctx: click.Context,
    /,
    words: tuple[str, ...],
    output: Path | None,
    force: bool,
    quiet: bool,
    skip: int,
    steps: int,
    stop: bool,
    is_module: bool,
    plan_path: Path | None,
    **flags: tuple[str, ...],
) -> None:
    """Run a training job, unchanged, and record where its memory goes.

    Everything after the script belongs to the job. The exit status is the job's own; 125 means that the recording
    could not start or the plan does not fit the model, 126 that the job cannot be run, 127 that it was not found.

    With --plan, or any of the flags that stand for policies, the job trains under that plan; the flags may be repeated.
    """
    target = find_target(words, is_module=is_module, is_command=ctx.meta["is_command"])
    try:
        plan = chosen_plan(plan_path, flags)
    except BadInputError as error:
        raise CannotStartError(str(error)) from None
    settings = Settings(
        output=output,
        force=force,
        quiet=quiet,
        skip=skip,
        steps=steps,
        stop=stop,
        plan=plan,
        plan_path=plan_path,
    )
    leave_like(record_job(target, settings))
