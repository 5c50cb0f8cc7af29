"""Checks the plans of a search by dry-running the recorded job under each, the fastest first, until one fits."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from memprof.analysis.plans.dry_check_results import INTERRUPTED, Checked, confirmed
from memprof.analysis.plans.suggest import Suggestion
from memprof.launch.dry.dry_job import DryOutcome, EndedError, dry_run, find_recorded_device, find_recorded_job
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

    A plan that a dry run cannot apply is passed by with the reason. An interruption (Ctrl-C) ends the check. Where the
    machine can and the window does not forbid it, files that the job writes in its folder are thrown away, and it
    reaches no network.

    Args:
        found: What the search found.
        most: Most dry runs.
        window: Steps of a dry run to let pass, and to look at.
        announce: Told, before the first dry run, which command runs and how.
        say: Told in a sentence what is done next.

    Returns:
        The plans that were looked at, in order; none where the job fits as it is.

    Raises:
        CannotStartError: The recording does not tell how to start the job, or is of another device.
        NotFoundError: The job's script or program is not here.
        NotExecutableError: It cannot be run.
    """
    target, device = find_recorded_job(found.manifest), find_recorded_device(found.manifest)
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
    """Returns the sentence that says what is about to run, and what it can change."""
    program, *words = mask_words(target.arguments)
    command = shlex.join((Path(program).name, *words))
    if why_not_isolated:
        return f"--check dry-runs {command} in this folder, where it may write, with its network ({why_not_isolated})."
    return f"--check dry-runs {command} without a network; files it writes in this folder are thrown away."
