"""Checks plans by dry-running the recorded job under each, fastest first, until one fits or no search finds more."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from memprof.analysis.plans.dry_check_results import INTERRUPTED, Checked
from memprof.analysis.plans.suggest import Suggestion
from memprof.launch.dry.dry_compiled import CompiledPlans, compiled_plans
from memprof.launch.dry.dry_job import (
    DryOutcome,
    EndedError,
    cover_recorded_steps,
    dry_run,
    find_recorded_device,
    find_recorded_job,
)
from memprof.launch.dry.dry_steps import dry_run_steps
from memprof.launch.dry.isolation import why_not_apart
from memprof.launch.parent.settings import DryWindow
from memprof.launch.parent.target import Target
from memprof.planners.search.explore import SearchRequest, SearchResult
from memprof.planners.search.plan_queue import PlanQueue
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.several_steps import DrySteps
from memprof.trace.manifest import Manifest
from memprof.trace.secrets.masking import mask_words

_INTERRUPTED = DryOutcome(None, INTERRUPTED, was_started=False)


class DryChecks:
    """Dry runs of a recorded job under plans.

    Where the machine supports it and the window does not forbid it, the job is isolated: files it writes in its folder
    are discarded, and it reaches no network. An interruption (Ctrl-C) ends all dry runs.
    """

    def __init__(
        self, manifest: Manifest, window: DryWindow, announce: Callable[[str], None], option: str = "--check"
    ) -> None:
        """Finds the job; runs nothing yet.

        Args:
            manifest: The recording's.
            window: Steps of a dry run to skip, and to record; those of the recording where they were not chosen.
            announce: Called before the first dry run with the command and its isolation.
            option: The option that requests the dry runs, for that announcement.

        Raises:
            CannotStartError: The recording lacks the job's command line, or is from an unsupported device.
            NotFoundError: The job's script or program is missing here.
            NotExecutableError: The script or program cannot be run.
        """
        self._target, self._device = find_recorded_job(manifest), find_recorded_device(manifest)
        self._window = cover_recorded_steps(window, manifest)
        self._announce = announce
        self._option = option
        self._is_apart: bool | None = None
        self._was_interrupted = False

    def steps(self, found: Suggestion, most: int, say: Callable[[str], None] = lambda _: None) -> DrySteps:
        """Returns the steps under the policies that are best not modelled, to search again from.

        Args:
            found: The search result.
            most: Number of its plans that will be checked.
            say: Called with a sentence on each next action.
        """
        return dry_run_steps(found, most, lambda plan, path: self._run(plan, say, path))

    def compiled(
        self,
        found: Suggestion,
        most: int,
        say: Callable[[str], None] = lambda _: None,
        is_late: Callable[[], bool] = lambda: False,
    ) -> CompiledPlans:
        """Returns the plans that compile the job within the budget, or as close to it as they come.

        Args:
            found: The search result.
            most: Maximum number of dry runs for each set of other policies.
            say: Called with a sentence on each next action.
            is_late: Whether no other dry run may start.
        """
        return compiled_plans(found, most, lambda plan, path: self._run(plan, say, path), is_late)

    def check(
        self,
        found: Suggestion,
        most: int,
        search: Callable[[SearchRequest], Suggestion],
        say: Callable[[str], None] = lambda _: None,
    ) -> tuple[Suggestion, tuple[Checked, ...]]:
        """Dry-runs plans, the fastest first, until one is confirmed to fit.

        What a dry run takes more than predicted is expected of plans with the same policies from then on, and the
        search repeated with it. A plan that a dry run cannot apply is skipped with the reason.

        Args:
            found: The search result.
            most: Maximum number of dry runs; at most as many plans are skipped.
            search: Repeats the search, for a request with the errors seen so far.
            say: Called with a sentence on each next action.

        Returns:
            The last search result, with the confirmed plan among its plans, and the checked plans, in order; none if
            the job already fits.
        """
        latest = found

        def search_again(tighter: SearchRequest) -> SearchResult:
            nonlocal latest
            say("searching again with what the dry runs showed")
            latest = search(tighter)
            return latest.answer

        queue = PlanQueue(found.answer, search_again)
        checked: list[Checked] = []
        runs = 0
        best, request = found.answer.best, found.answer.search_request
        one = None if best is None or not best.policies else queue.next()
        while one is not None:
            outcome = self._run(latest.predicted(one), say)
            runs += outcome.was_started
            result = outcome.checked(one.plan, one, request)
            checked.append(result)
            if result.fits:
                return latest.with_plan(one), tuple(checked)
            if self._was_interrupted or max(runs, len(checked) - runs) == most:
                break
            if outcome.peak_bytes is None:
                queue.note_refused(one)
            else:
                queue.note_above(one, max(outcome.peak_bytes, result.reserved_bytes))
            one = queue.next()
        return latest, tuple(checked)

    def _run(self, plan: Plan, say: Callable[[str], None], keep: Path | None = None) -> DryOutcome:
        """Dry-runs the job under a plan, unless an earlier dry run was interrupted."""
        if self._was_interrupted:
            return _INTERRUPTED
        if self._is_apart is None:
            why_not = why_not_apart() if self._window.isolate else "isolate = false in pyproject.toml"
            self._is_apart = not why_not
            self._announce(_describe_run(self._option, self._target, why_not))
        say(f"dry-running {self._target.name} with {plan.describe()}")
        try:
            return dry_run(self._target, plan, self._window, self._device, keep, apart=self._is_apart)
        except EndedError:
            self._was_interrupted = True
            return _INTERRUPTED


def _describe_run(option: str, target: Target, why_not_isolated: str) -> str:
    """Returns a sentence with the command about to run, and what it can change."""
    program, *words = mask_words(target.arguments)
    command = shlex.join((Path(program).name, *words))
    if why_not_isolated:
        return f"{option} dry-runs {command} in this folder, where it may write, with its network ({why_not_isolated})."
    return f"{option} dry-runs {command} without a network; files it writes in this folder are discarded."
