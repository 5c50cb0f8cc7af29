"""One training recorded from another library's callbacks: told of its steps, it records, tells and plans."""

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
from memprof.integrations.asked import Asked
from memprof.integrations.fitting import FittingPlan, find_fit
from memprof.launch import child
from memprof.launch.inline import InlineRecording
from memprof.launch.outcome.plan_errors import policy_at_fault
from memprof.launch.outcome.plan_verdict import Ended, add_budget, add_plan
from memprof.launch.outcome.verdict import Verdict, describe_recording
from memprof.policies.plan.plan_tables import plan_from_tables
from memprof.recorder.rank_identity import find_rank
from memprof.trace.store import Trace

P = ParamSpec("P")


def _safely(method: Callable[Concatenate[Session, P], None]) -> Callable[Concatenate[Session, P], None]:
    """Keeps what fails in a method from the training: it is told, and the recording ends."""

    def run(session: Session, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(session, *args, **kwargs)
        except (MemprofError, OSError) as error:
            session.give_up(str(error))
        except Exception as error:  # a fault of ours
            if os.environ.get("MEMPROF_DEBUG", "") not in ("", "0"):
                raise
            session.give_up(
                f"{type(error).__name__}: {error}. This is a fault of memprof, not of your job; MEMPROF_DEBUG=1 shows "
                "where it is."
            )

    functools.update_wrapper(run, method)
    return run


class Session:
    """A recording that another library's events drive.

    Nothing of it ends the training: what fails is told on stderr, and the training goes on unrecorded. Where
    ``memprof record`` runs the job, that records it, and a session does nothing.

    Attributes:
        asked: What is to be recorded; ``path`` is where this process's recording lies, once it has begun.
        fit: What was found for the budget, once the window is over; None before, and without a budget.
        tell: What is said of a recording and a plan beyond that; by default nothing.
    """

    def __init__(self, asked: Asked, tell: Callable[[FittingPlan], list[str]] = lambda _: []) -> None:
        """Prepares; nothing is recorded before `begin`."""
        self.asked = asked
        self.fit: FittingPlan | None = None
        self.tell = tell
        self._first = asked
        self._trainings = 0
        self._recording: InlineRecording | None = None
        self._process = os.getpid()

    @property
    def is_active(self) -> bool:
        """Whether a recording is under way."""
        return self._recording is not None

    @_safely
    def begin(self, *, tells_steps: bool = True) -> None:
        """Begins to record a training; another one that was under way is ended, which is how a failed one is met.

        Args:
            tells_steps: Whether steps end where `end_step` is called, and not with the optimizers' updates.
        """
        self.end()
        if child.is_recording():
            self.say("memprof record records this job already; the callback records nothing.")
            return
        self._trainings += 1
        self._process = os.getpid()
        path = self._first.path
        if self._trainings > 1:
            path = path.with_name(f"{path.stem}.{self._trainings}{path.suffix}")
        gc.collect()  # garbage would pass for the job's, and be gone in the steps that are compared with these
        recording = InlineRecording(
            path,
            skip=self._first.skip,
            steps=self._first.steps,
            force=self._first.force,
            light=False,
            is_told_steps=tells_steps,
        )
        recording.__enter__()
        self.asked = dataclasses.replace(self._first, path=recording.path)
        self._recording = recording
        atexit.register(self._at_exit)

    @_safely
    def end_step(self) -> None:
        """Ends a step; after the last of the window, the recording is written and a plan searched for."""
        if self._recording is not None:
            self._recording.step()
            self._finish_if_over()

    @_safely
    def look(self) -> None:
        """Is told that a batch is over, in trainings whose updates end the steps."""
        self._finish_if_over()

    @_safely
    def pause(self) -> None:
        """Leaves out what comes now, such as an evaluation."""
        if self._recording is not None:
            self._recording.pause()

    @_safely
    def resume(self) -> None:
        """Goes on, with the beginning of a step."""
        if self._recording is not None:
            self._recording.resume()

    @_safely
    def end(self, error: BaseException | None = None) -> None:
        """Ends the recording where it is, if one is under way.

        Args:
            error: The error that ends the training, None where it ends in order.
        """
        recording, self._recording = self._recording, None
        if recording is None:
            return
        atexit.unregister(self._at_exit)
        if os.getpid() != self._process:
            return  # a forked child: the recording is its parent's
        recording.__exit__(type(error) if error else None, error, None)
        if recording.packed is None:
            return  # why, it has said
        verdict = describe_recording(recording.packed, recording.target)
        trace = Trace.open(recording.path)
        tables = trace.manifest.plan
        if tables:
            # The training's own code applies the plan, so that memprof record is not the way to run it again.
            job = PlannedJob(plan_from_tables(tables))
            fault = "" if error is None else policy_at_fault(error)
            ended = Ended(has_failed=error is not None, ran_out=bool(verdict.post_mortem), fault=fault)
            verdict = add_plan(verdict, job, ended, recording.path)
            verdict = add_budget(verdict, job, job.plan.budget_bytes, recording.path, "")
        # Each rank writes its own file; one speaks for all.
        if find_rank(os.environ)[0] == 0:
            self._say_verdict(verdict)
            if self.asked.budget and error is None:
                self._plan(trace)

    def give_up(self, sentence: str) -> None:
        """Says what is wrong, and leaves the training alone."""
        self.say(sentence)
        recording, self._recording = self._recording, None
        if recording is not None:
            atexit.unregister(self._at_exit)
            recording.abandon()

    def say(self, sentence: str) -> None:
        """Says something to whoever trains."""
        if sys.stderr is not None:
            print(f"memprof: {sentence}", file=sys.stderr, flush=True)

    def _finish_if_over(self) -> None:
        if self._recording is not None and not self._recording.is_active:
            self.end()

    def _plan(self, trace: Trace) -> None:
        self.fit = fit = find_fit(trace, self.asked)
        for sentence in (*fit.sentences(), *self.tell(fit)):
            self.say(sentence)

    def _say_verdict(self, verdict: Verdict) -> None:
        if sys.stderr is not None:
            print(verdict, file=sys.stderr, flush=True)

    def _at_exit(self) -> None:
        if os.getpid() == self._process:
            error: Any = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
            self.end(error)
