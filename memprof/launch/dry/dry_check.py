"""Checks plans by dry-running the recorded job under each, fastest first, until one fits or no search finds more."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from memprof.analysis.plans.basis import Basis
from memprof.analysis.plans.dry_check_results import INTERRUPTED, Checked
from memprof.analysis.plans.suggest import Suggestion
from memprof.launch.dry.dry_compiled import CompiledPlans, compiled_plans
from memprof.launch.dry.dry_job import (
    NO_PEAKS,
    cover_recorded_steps,
    find_recorded_device,
    find_recorded_job,
    read_values_of,
)
from memprof.launch.dry.dry_outcome import DryOutcome, EndedError
from memprof.launch.dry.dry_steps import FrameCache, dry_run_frames
from memprof.launch.dry.job_server import DryRequest, JobServer
from memprof.launch.dry.rank_processes import why_not_apart
from memprof.launch.parent.settings import DryWindow
from memprof.launch.parent.target import Target
from memprof.planners.search.plan_queue import PlanQueue
from memprof.planners.search.request import SearchRequest, SearchResult
from memprof.policies.base import Policy
from memprof.policies.plan.several_steps import DrySteps
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.manifest import Manifest
from memprof.trace.secrets import mask_words

_INTERRUPTED = DryOutcome(None, INTERRUPTED, was_started=False)


class DryChecks:
    """Dry runs of a recorded job under plans.

    Where the machine supports it and the window does not forbid it, the job is isolated: files it writes in its folder
    are discarded, and it reaches no network. An interruption (Ctrl-C) ends all dry runs. Use it as a context manager.
    """

    def __init__(
        self,
        manifest: Manifest,
        window: DryWindow,
        announce: Callable[[str], None],
        option: str = "--check",
        deadline: float = math.inf,
        digest: str = "",
        peaks: Mapping[int, int] = NO_PEAKS,
        recording: str = "",
    ) -> None:
        """Finds the job; runs nothing yet.

        Args:
            manifest: The recording's.
            window: Steps of a dry run to skip, and to record; those of the recording where they were not chosen.
            announce: Called before the first dry run with the command and its isolation.
            option: What requests the dry runs, for that announcement.
            deadline: ``time.monotonic`` value at which dry runs that still run are ended.
            digest: Identifies the recording and its job's files, to repeat no dry run; "" to make all of them.
            peaks: Peaks of the recorded steps by their numbers, in bytes.
            recording: Path of the recording, whose values are replayed; "" for placeholders.

        Raises:
            CannotStartError: The recording lacks the job's command line, or is from an unsupported device.
            NotFoundError: The job's script or program is missing here.
            NotExecutableError: The script or program cannot be run.
        """
        self._target, self._device = find_recorded_job(manifest), find_recorded_device(manifest)
        self._window = cover_recorded_steps(window, manifest, peaks)
        self._announce, self._option, self._deadline = announce, option, deadline
        self._manifest = manifest
        self._read_values = read_values_of(recording) if recording else ""
        self._server: JobServer | None = None
        self._cache = FrameCache(digest, self._window, self._device) if digest else None
        self._was_interrupted = False
        #: Why the job refused policies that change kernels, or failed under them.
        self.refused: dict[tuple[Policy, ...], str] = {}
        #: Why the unmodified job's dry run cannot be trusted, "" if it can; None before it.
        self.distrust: str | None = "" if manifest.backend.name == DRY_RUN else None

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends what was started for the dry runs."""
        if self._server is not None:
            self._server.__exit__(kind, error, traceback)

    def prepare(self) -> None:
        """Starts the process that imports torch for the dry runs, unless some of this job are kept from earlier."""
        if self._cache is None or not self._cache.has_any():
            self._started().prepare()

    def frames(
        self, frames: Sequence[tuple[Policy, ...]], basis: Basis, say: Callable[[str], None] = lambda _: None
    ) -> DrySteps:
        """Returns the steps under policies that change kernels, to predict plans from.

        The unmodified job is dry-run with the first of them: if it does not peak where it was recorded to, none is
        trusted.
        """

        def run(requests: Sequence[DryRequest]) -> Sequence[DryOutcome]:
            if self.distrust is not None or not requests:
                return self._run(requests, say)
            base, *outcomes = self._run([DryRequest(None), *requests], say)
            self.distrust = base.describe_distrust(basis.peak_bytes)
            return outcomes

        learned, refused = dry_run_frames(frames, basis, self._manifest, run)
        self.refused |= {} if self.distrust else refused
        return {} if self.distrust else learned

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
        return compiled_plans(found, most, lambda requests: self._run(requests, say), is_late)

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
            The last search result, with the confirmed plan among its plans and without those that exceeded the budget,
            and the checked plans, in order; none if the job already fits.
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
            (outcome,) = self._run([DryRequest(latest.predicted(one))], say)
            runs += outcome.was_started
            result = outcome.checked(one.plan, one, request)
            checked.append(result)
            if result.fits:
                return latest.with_dry_runs(checked, one), tuple(checked)
            if self._was_interrupted or max(runs, len(checked) - runs) == most:
                break
            if outcome.peak_bytes is None:
                queue.note_refused(one)
            else:
                queue.note_above(one, request.budget_bytes + result.excess_bytes, is_reserved=result.is_reserved)
            one = queue.next()
        return latest.with_dry_runs(checked), tuple(checked)

    def _run(self, requests: Sequence[DryRequest], say: Callable[[str], None]) -> Sequence[DryOutcome]:
        """Dry-runs the job under plans, unless an earlier dry run was interrupted."""
        if self._was_interrupted or not requests:
            return [_INTERRUPTED for _ in requests]
        kept = [None if self._cache is None else self._cache.find(request) for request in requests]
        missing = [request for request, outcome in zip(requests, kept, strict=True) if outcome is None]
        made = iter(self._made(missing, say) if missing else ())
        return [next(made) if outcome is None else outcome for outcome in kept]

    def _started(self) -> JobServer:
        if self._server is None:
            why_not = why_not_apart() if self._window.isolate else "isolate = false in pyproject.toml"
            threads = 0 if self._device else self._manifest.machine.threads
            self._server = JobServer(
                *(self._target, self._window, self._device),
                apart=not why_not,
                read_values=self._read_values,
                threads=threads,
            )
            self._announce(_describe_run(self._option, self._target, why_not))
        return self._server

    def _made(self, requests: Sequence[DryRequest], say: Callable[[str], None]) -> Sequence[DryOutcome]:
        server = self._started()
        plans = [request.plan.describe() for request in requests if request.plan is not None]
        say(f"dry-running {self._target.name} with {'; '.join(plans)}")
        try:
            outcomes = server.run(requests, self._deadline)
        except EndedError:
            self._was_interrupted = True
            return [_INTERRUPTED for _ in requests]
        if self._cache is not None:
            for request, outcome in zip(requests, outcomes, strict=True):
                self._cache.keep(request, outcome)
        return outcomes


def _describe_run(option: str, target: Target, why_not_isolated: str) -> str:
    """Returns a sentence with the command about to run, and what it can change."""
    program, *words = mask_words(target.arguments)
    command = shlex.join((Path(program).name, *words))
    if why_not_isolated:
        return f"{option} dry-runs {command} in this folder, where it may write, with its network ({why_not_isolated})."
    return f"{option} dry-runs {command} without a network; files it writes in this folder are discarded."
