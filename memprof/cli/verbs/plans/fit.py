"""`memprof fit`: runs a job until a plan is measured to stay within a budget."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memprof.cli.options.command_classes import RecordCommand, option
from memprof.cli.options.search_options import read_search_request, search_options
from memprof.cli.options.shared_options import job_arguments, json_option, window_options
from memprof.errors import GateFailedError
from memprof.harmless import notify
from memprof.launch.parent.settings import read_dry_window, read_project_settings
from memprof.launch.parent.target import find_target

if TYPE_CHECKING:
    from memprof.analysis.plans.suggest import Suggestion
    from memprof.launch.fit.request import FitResult
    from memprof.planners.search.request import SearchRequest
    from memprof.policies.plan.several_steps import DrySteps
    from memprof.trace.store import Trace

_EPILOG = """\b
Examples:
  memprof fit --budget 8GiB train.py --epochs 1
  memprof fit --budget 60% --max-slowdown 15% -o plan.toml -m package.train
"""

_SIGNAL = 128  # shells report death by a signal as 128 plus its number


class FitCommand(RecordCommand):
    """As ``record``, but reads only the project's settings for the steps to record."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Passes the project's settings to click as defaults."""
        given = read_project_settings(Path.cwd())
        extra["default_map"] = {key: value for key, value in given.items() if key in ("skip", "steps")}
        return super().make_context(info_name, args, parent, **extra)


@click.command(
    "fit",
    cls=FitCommand,
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
    options_metavar="[OPTIONS]",
    epilog=_EPILOG,
)
@search_options
@option(
    "-o",
    "--output",
    group="Output",
    type=click.Path(path_type=Path),
    metavar="FOLDER|PLAN",
    help="Folder for the plan and the recordings, or a plan file (.toml).  [default: <script>.<time>.fit]",
)
@option("-f", "--force", group="Output", is_flag=True, help="Replace the files of an earlier fit.")
@window_options()
@option(
    "--stop/--no-stop",
    group="Recorded steps",
    default=True,
    show_default=True,
    help="End each run after the recorded steps, or let it train.",
)
@option(
    "--verify",
    group="Runs under a plan",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Verify up to N different plans and keep the fastest.",
)
@option(
    "--attempts",
    group="Runs under a plan",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    metavar="N",
    help="Maximum runs under a plan.",
)
@option(
    "--compile",
    "compiles",
    group="Runs under a plan",
    is_flag=True,
    help="Also run the job compiled (torch.compile), and keep that if it is the fastest that fits.",
)
@option(
    "--dry-run/--no-dry-run",
    group="Runs under a plan",
    default=True,
    show_default=True,
    help="Dry-run each plan first, and skip those that do not fit as applied.",
)
@json_option
@job_arguments
@click.pass_context
def fit(
    ctx: click.Context,
    /,
    words: tuple[str, ...],
    output: Path | None,
    force: bool,
    skip: int,
    steps: int,
    stop: bool,
    verify: int,
    attempts: int,
    compiles: bool,
    dry_run: bool,
    is_json: bool,
    is_module: bool,
    **search_flags: Any,
) -> int:
    """Find a plan under which a training job is measured to fit a budget.

    The job runs a few steps unmodified, then under the fastest plan that is predicted to fit and does so in a dry run.
    If the measured peak exceeds the budget, or the plan cannot be applied to the job, the search is tightened and the
    next plan tried. The job's output goes to stderr. Ctrl-C ends the fit with the best plan verified so far.

    If the unmodified job runs out of memory, plans are made from its dry run.

    Exit status: 0 a plan was verified, or the job already fits; 3 nothing was recorded to plan from; 4 no plan was
    verified within the budget; 125 to 127 as for memprof record; 130 interrupted; the job's own if it fails by itself.
    """
    search_request = partial(read_search_request(**search_flags), is_checked=True)
    target = find_target(words, is_module=is_module, is_command=ctx.meta["is_command"], verb="fit")
    from memprof.launch.fit.fit import fit as find_fit
    from memprof.launch.fit.request import Request, claim_outputs

    request = Request(
        target=target,
        outputs=claim_outputs(output, target.stem, force=force),
        search_request=search_request,
        skip=skip,
        steps=steps,
        stop=stop,
        verify=verify,
        most_attempts=attempts,
        compiles=compiles,
        dry_window=read_dry_window(Path.cwd()) if dry_run else None,
    )
    found = find_fit(request, _search, notify)
    job = shlex.join(("--", *target.arguments) if ctx.meta["is_command"] else target.arguments[1:])
    from memprof.cli.page import show
    from memprof.cli.pages.fit_page import fill_fit, fit_to_json

    show(lambda page: fill_fit(page, found, job), lambda: fit_to_json(found, job), is_json=is_json)
    return _status_of(found)


def _search(trace: Trace, search_request: SearchRequest, dry_steps: DrySteps) -> Suggestion:
    from memprof.analysis.plans.basis import basis_of
    from memprof.analysis.plans.suggest import suggest
    from memprof.cli.progress import SearchBar

    with SearchBar(search_request) as bar:
        return suggest(trace, replace(basis_of(trace), dry_steps=dry_steps), search_request, bar.add)


def _status_of(found: FitResult) -> int:
    """Returns the exit status of the result; if the job failed by itself, exits as the job did."""
    if found.returncode:
        from memprof.launch.parent.parent import leave_like

        leave_like(found.returncode)
    if found.ended_by:
        return _SIGNAL + found.ended_by
    return 0 if found.best is not None or found.is_met else GateFailedError.exit_code
