"""The runs before `memprof fit` spends one on a plan: dry runs of it, and the job under torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from memprof.analysis.plans.frames import frames_to_dry_run
from memprof.analysis.plans.suggest import Suggestion
from memprof.launch.dry.dry_job import NO_PEAKS, cover_recorded_steps, find_recorded_device, read_values_of
from memprof.launch.dry.dry_outcome import DryOutcome
from memprof.launch.dry.dry_steps import dry_run_frames
from memprof.launch.dry.job_server import DryRequest, JobServer
from memprof.launch.fit.request import Attempt, FitResult
from memprof.launch.parent.settings import DryWindow
from memprof.launch.parent.target import CannotStartError
from memprof.policies.base import Policy
from memprof.policies.compile.policy import Compile
from memprof.policies.loss.policy import ChunkedLoss
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.prediction import Prediction
from memprof.policies.plan.several_steps import DrySteps
from memprof.policies.precision.policy import Precision
from memprof.trace.manifest import Manifest
from memprof.trace.store import Trace

#: Activation budgets of the compiler to try in turn, as fractions of what it would save for backward, until one fits.
_BUDGETS = (1.0, 0.5, 0.2)


class Rehearsal:
    """Dry-runs plans, as long as dry runs of this job are reliable.

    Before the first plan, the unmodified job is dry-run: if that fails or disagrees with the recording, only real runs
    decide, which is reported once.
    """

    def __init__(
        self, found: FitResult, manifest: Manifest, say: Callable[[str], None], peaks: Mapping[int, int] = NO_PEAKS
    ) -> None:
        """Stores the job; runs nothing yet.

        Args:
            found: The request, and the recording of the unmodified job.
            manifest: The manifest of that recording.
            say: Called with the reason if there are no dry runs.
            peaks: Peaks of the recorded steps by their numbers, in bytes.
        """
        self._found = found
        self._say = say
        window = found.request.dry_window
        self._window = None if window is None else cover_recorded_steps(window, manifest, peaks)
        self._manifest = manifest
        self._device = ""
        self._is_tested = False
        self._server: JobServer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.__exit__(kind, error, traceback)

    def dry_run(self, plan: Plan) -> DryOutcome:
        """Dry-runs the job under a plan; the result has no peak if only a real run can measure it.

        Raises:
            EndedError: A signal that asks the whole command to end arrived during the run.
        """
        (outcome,) = self._run([DryRequest(plan)])
        if outcome.peak_bytes is None and self._window is not None:
            self._say(f"it is not dry-run: {outcome.reason}")
        return outcome

    def steps(self, suggestion: Suggestion) -> DrySteps:
        """Returns the steps under the policies that change kernels, to search again from.

        Raises:
            EndedError: A signal that asks the whole command to end arrived during a run.
        """
        frames = frames_to_dry_run(suggestion, self._found.request.most_attempts)
        return dry_run_frames(frames, suggestion.basis, suggestion.manifest, self._run)[0]

    def _run(self, requests: Sequence[DryRequest]) -> Sequence[DryOutcome]:
        """Dry-runs the job under plans, as long as dry runs are reliable."""
        if not self._is_tested:
            self._test()
        if self._window is None:
            return [DryOutcome(None, was_started=False) for _ in requests]
        for request in requests:
            if request.keep is not None and request.plan is not None:
                self._say(f"dry-running the job with {request.plan.describe()}, to plan from its steps")
        return self._runs(self._window).run(requests)

    def _runs(self, window: DryWindow) -> JobServer:
        if self._server is None:
            values = read_values_of(self._found.request.outputs.run)
            self._server = JobServer(self._found.request.target, window, self._device, read_values=values)
        return self._server

    def _test(self) -> None:
        self._is_tested = True
        recorded = self._found.recorded
        if self._window is None or recorded is None:
            return
        try:
            self._device = find_recorded_device(self._manifest)
        except CannotStartError as error:
            self._give_up(str(error))
            return
        if self._found.is_from_dry_run:
            return
        (outcome,) = self._runs(self._window).run([DryRequest(None)])
        if distrust := outcome.describe_distrust(recorded.peak_bytes):
            self._give_up(distrust)

    def _give_up(self, reason: str) -> None:
        self._window = None
        sentence = f"{reason.rstrip('.')}; plans are tried in real runs only."
        self._say(sentence)
        self._found.warnings = (*self._found.warnings, sentence)


def compiled_plans(found: FitResult) -> Iterator[Plan]:
    """Yields the plans to run with the whole model compiled, stopping once one fits.

    Precision and chunked loss of the best plan so far are kept: they are independent of the compiler.

    Args:
        found: The result of the runs so far; read again for each plan.
    """
    others: tuple[Policy, ...] = ()
    if found.best is not None:
        others = tuple(policy for policy in found.best.plan.policies if isinstance(policy, Precision | ChunkedLoss))
    for budget in _BUDGETS:
        yield Plan((*others, Compile(activation_budget=budget)), budget_bytes=found.budget_bytes)
        if is_settled(found.attempts[-1]):
            return


def measured_plan(plan: Plan, first: Suggestion, head: Trace, path: Path) -> Plan:
    """Returns a compiled plan with the measurement as its prediction.

    Args:
        plan: The plan.
        first: The search on the unmodified job.
        head: The run under the plan.
        path: Where that run's recording will be kept.
    """
    policies = tuple(
        replace(policy, measured=str(path)) if isinstance(policy, Compile) else policy for policy in plan.policies
    )
    prediction = Prediction.measured(first.basis.step, head.fullest_step(), trace=first.trace)
    return Plan(policies, prediction, plan.budget_bytes)


def is_settled(attempt: Attempt) -> bool:
    """Returns whether a smaller compiler budget is pointless: the plan fits, or the job cannot be compiled."""
    return attempt.outcome != "above"
