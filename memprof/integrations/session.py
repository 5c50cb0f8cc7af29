"""One training recorded from another library's callbacks: records its steps, reports and plans."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import gc
import os
import sys
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from memprof.analysis.plans.another_plan import PlannedJob
from memprof.errors import MemprofError
from memprof.integrations.fitting import CallbackRequest, FittingPlan, find_fit
from memprof.launch import child
from memprof.launch.inline import InlineRecording
from memprof.launch.outcome.plan_marks import policy_at_fault
from memprof.launch.outcome.plan_verdict import Ended, add_budget, add_plan
from memprof.launch.outcome.verdict import describe_recording
from memprof.policies.plan.plan_tables import plan_from_tables
from memprof.recorder.machine import find_rank
from memprof.trace.store import Trace

P = ParamSpec("P")


def _safely(method: Callable[Concatenate[Session, P], None]) -> Callable[Concatenate[Session, P], None]:
    """Keeps errors of a method out of the training: the error is printed, and the recording ends."""

    def run(session: Session, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(session, *args, **kwargs)
        except (MemprofError, OSError) as error:
            session.give_up(str(error))
        except Exception as error:  # a bug in memprof
            if os.environ.get("MEMPROF_DEBUG", "") not in ("", "0"):
                raise
            session.give_up(
                f"{type(error).__name__}: {error}. This is a fault of memprof, not of your job; MEMPROF_DEBUG=1 shows "
                "where it is."
            )

    functools.update_wrapper(run, method)
    return run


class Session:
    """A recording driven by another library's callbacks.

    Its failures never end the training: the error is printed on stderr, and the training continues unrecorded. Under
    ``memprof record``, which records the job itself, a session does nothing.

    Attributes:
        request: What to record; ``path`` is this process's own file once recording has started.
        fit: The search result for the budget, once the window is over; None before, and without a budget.
        more_sentences: Returns further sentences to print about a recording and its plan; by default none.
    """

    def __init__(
        self, request: CallbackRequest, more_sentences: Callable[[FittingPlan], list[str]] = lambda _: []
    ) -> None:
        """Prepares the session; nothing is recorded before `begin`."""
        self.request = request
        self.fit: FittingPlan | None = None
        self.more_sentences = more_sentences
        self._first = request
        self._trainings = 0
        self._recording: InlineRecording | None = None
        self._process = os.getpid()

    @property
    def is_active(self) -> bool:
        """Whether a recording is in progress."""
        return self._recording is not None

    @_safely
    def begin(self, *, ends_steps: bool = True) -> None:
        """Starts recording a training; first ends one still in progress, which happens after a failed training.

        Args:
            ends_steps: Steps end with calls of `end_step` rather than with the optimizers' updates.
        """
        self.end()
        if child.is_recording():
            self.say("memprof record already records this job; the callback records nothing.")
            return
        self._trainings += 1
        self._process = os.getpid()
        path = self._first.path
        if self._trainings > 1:
            path = path.with_name(f"{path.stem}.{self._trainings}{path.suffix}")
        gc.collect()  # garbage would be attributed to the job, and be missing from the steps compared with these
        recording = InlineRecording(
            path,
            skip=self._first.skip,
            steps=self._first.steps,
            force=self._first.force,
            light=False,
            ends_steps=ends_steps,
        )
        recording.__enter__()
        self.request = dataclasses.replace(self._first, path=recording.path)
        self._recording = recording
        atexit.register(self._at_exit)

    @_safely
    def end_step(self) -> None:
        """Ends a step; after the last of the window, writes the recording and searches for a plan."""
        if self._recording is not None:
            self._recording.step()
            self._finish_if_over()

    @_safely
    def look(self) -> None:
        """Handles the end of a batch, in trainings whose optimizer updates end the steps."""
        self._finish_if_over()

    @_safely
    def pause(self) -> None:
        """Pauses recording, e.g. for an evaluation."""
        if self._recording is not None:
            self._recording.pause()

    @_safely
    def resume(self) -> None:
        """Resumes recording at the start of a step."""
        if self._recording is not None:
            self._recording.resume()

    @_safely
    def end(self, error: BaseException | None = None) -> None:
        """Ends the recording now, if one is in progress.

        Args:
            error: The error that ends the training; None if it ends normally.
        """
        recording, self._recording = self._recording, None
        if recording is None:
            return
        atexit.unregister(self._at_exit)
        if os.getpid() != self._process:
            return  # a forked child: the recording belongs to its parent
        recording.__exit__(type(error) if error else None, error, None)
        if recording.packed is None:
            return  # the reason has been printed
        verdict = describe_recording(recording.packed, recording.target)
        trace = Trace.open(recording.path)
        tables = trace.manifest.plan
        if tables:
            # The training's own code applies the plan, so the next command must not be memprof record.
            job = PlannedJob(plan_from_tables(tables))
            fault = "" if error is None else policy_at_fault(error)
            ended = Ended(has_failed=error is not None, ran_out=bool(verdict.post_mortem), fault=fault)
            verdict = add_plan(verdict, job, ended, recording.path)
            verdict = add_budget(verdict, job, job.plan.budget_bytes, recording.path, "")
        # Each rank writes its own file; only one prints.
        if find_rank(os.environ)[0] == 0:
            if sys.stderr is not None:
                print(verdict, file=sys.stderr, flush=True)
            if self.request.budget and error is None:
                self._plan(trace)

    def give_up(self, sentence: str) -> None:
        """Prints what is wrong, and stops recording."""
        self.say(sentence)
        recording, self._recording = self._recording, None
        if recording is not None:
            atexit.unregister(self._at_exit)
            recording.abandon()

    def say(self, sentence: str) -> None:
        """Prints a sentence for the user."""
        if sys.stderr is not None:
            print(f"memprof: {sentence}", file=sys.stderr, flush=True)

    def _finish_if_over(self) -> None:
        if self._recording is not None and not self._recording.is_active:
            self.end()

    def _plan(self, trace: Trace) -> None:
        self.fit = fit = find_fit(trace, self.request)
        for sentence in (*fit.sentences(), *self.more_sentences(fit)):
            self.say(sentence)

    def _at_exit(self) -> None:
        if os.getpid() == self._process:
            error: Any = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
            self.end(error)
