"""Checks a search's plans by dry-running the recorded job under each, fastest first, until one fits."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from memprof.analysis.plans.dry_check_results import INTERRUPTED, Checked, confirmed
from memprof.analysis.plans.suggest import Suggestion
from memprof.launch.dry.dry_job import (
    DryOutcome,
    EndedError,
    cover_recorded_steps,
    dry_run,
    find_recorded_device,
    find_recorded_job,
)
from memprof.launch.dry.isolation import why_not_apart
from memprof.launch.parent.settings import DryWindow
from memprof.launch.parent.target import Target
from memprof.trace.secrets.masking import mask_words

_INTERRUPTED = DryOutcome(None, INTERRUPTED, was_started=False)


def check_plans(
    found: Suggestion,
    most: int,
    window: DryWindow,
    announce: Callable[[str], None],
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Checked, ...]:
    """Dry-runs the plans of a search until one is confirmed to fit.

    A plan that a dry run cannot apply is skipped with the reason. An interruption (Ctrl-C) ends the check. Where the
    machine supports it and the window does not forbid it, the job is isolated: files it writes in its folder are
    discarded, and it reaches no network.

    Args:
        found: The search result.
        most: Maximum number of dry runs.
        window: Steps of a dry run to skip, and to record; those of the recording where they were not chosen.
        announce: Called before the first dry run with the command and its isolation.
        say: Called with a sentence on each next action.

    Returns:
        The checked plans, in order; none if the job already fits.

    Raises:
        CannotStartError: The recording lacks the job's command line, or is from an unsupported device.
        NotFoundError: The job's script or program is missing here.
        NotExecutableError: The script or program cannot be run.
    """
    target, device = find_recorded_job(found.manifest), find_recorded_device(found.manifest)
    window = cover_recorded_steps(window, found.manifest)
    checked: list[Checked] = []
    runs, apart = 0, False
    for one in found.plans:
        if runs == most or not one.policies or confirmed(tuple(checked)) is not None:
            break
        if not checked:
            why_not = why_not_apart() if window.isolate else "isolate = false in pyproject.toml"
            apart = not why_not
            announce(_describe_run(target, why_not))
        say(f"dry-running {target.name} with {one.plan.describe()}")
        try:
            outcome = dry_run(target, found.predicted(one), window, device, apart=apart)
        except EndedError:
            outcome, runs = _INTERRUPTED, most
        runs += outcome.was_started
        budget_bytes = found.answer.search_request.budget_bytes
        upper_bytes = one.interval.most_bytes
        checked.append(Checked(one.plan, one.peak_bytes, budget_bytes, outcome.peak_bytes, outcome.reason, upper_bytes))
    return tuple(checked)


def _describe_run(target: Target, why_not_isolated: str) -> str:
    """Returns a sentence with the command about to run, and what it can change."""
    program, *words = mask_words(target.arguments)
    command = shlex.join((Path(program).name, *words))
    if why_not_isolated:
        return f"--check dry-runs {command} in this folder, where it may write, with its network ({why_not_isolated})."
    return f"--check dry-runs {command} without a network; files it writes in this folder are thrown away."
