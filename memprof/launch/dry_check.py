"""Checks the plans of a search by dry-running the recorded job under each, the fastest first, until one fits."""

from __future__ import annotations

from collections.abc import Callable

from memprof.analysis.checked import INTERRUPTED, Checked, confirmed
from memprof.analysis.suggest import Suggestion
from memprof.launch.dry_job import DryOutcome, EndedError, dry_run, find_recorded_device, find_recorded_job
from memprof.launch.settings import DryWindow

_INTERRUPTED = DryOutcome(None, INTERRUPTED, was_started=False)


def check_plans(
    found: Suggestion, most: int, window: DryWindow, say: Callable[[str], None] = lambda _: None
) -> tuple[Checked, ...]:
    """Dry-runs the plans of a search until one is confirmed to fit.

    A plan that a dry run cannot apply is passed by with the reason. An interruption (Ctrl-C) ends the check.

    Args:
        found: What the search found.
        most: Most dry runs.
        window: Steps of a dry run to let pass, and to look at.
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
    runs = 0
    for one in found.plans:
        if runs == most or not one.policies or confirmed(tuple(checked)) is not None:
            break
        say(f"dry-running {target.name} with {one.plan.describe()}")
        try:
            outcome = dry_run(target, found.predicted(one), window, device)
        except EndedError:
            outcome, runs = _INTERRUPTED, most
        runs += outcome.was_started
        budget_bytes = found.answer.wish.budget_bytes
        peak, most = one.peak_bytes, one.interval.most_bytes
        checked.append(Checked(one.plan, peak, budget_bytes, outcome.peak_bytes, outcome.reason, most))
    return tuple(checked)
