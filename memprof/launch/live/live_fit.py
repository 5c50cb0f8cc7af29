"""Fits a model to a budget between its training steps: observes, plans, applies and verifies."""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
import warnings

import torch

from memprof.analysis.plans.basis import Basis, basis_of_steps
from memprof.errors import InconclusiveError, MemprofError, PolicyError, UsageError
from memprof.launch import child
from memprof.launch.apply import apply_to
from memprof.launch.fit.request import Measured, measure
from memprof.launch.live import sentences
from memprof.launch.live.observed import DevicePeak, Observed, StepEnds
from memprof.machines.budget import parse_budget
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.explore import explore
from memprof.planners.search.plan_queue import PlanQueue
from memprof.planners.search.request import SearchRequest, SearchResult
from memprof.policies.plan.plan import Plan, plan_for
from memprof.policies.runtime.job import Job

#: Plans that are applied and measured before giving up and leaving the job unmodified.
_MOST_ATTEMPTS = 4
#: The active instance in this process; it records, and two recorders would record each other.
_at_work: LiveFit | None = None


class LiveFit:
    """Fits a model to a budget while it trains.

    It observes four steps, plans and applies between two steps, and observes four more to compare. Then all hooks are
    removed; on a CUDA device one counter is read after each update.

    Attributes:
        plan: The plan in force; None if there is none.
        job: The job that the plan was applied to: its notes, and ``undo()``; None if there is none.
        predicted_bytes: Predicted peak under the plan.
        measured_bytes: Peak of the step measured under it; without a plan, of the unmodified job.
        is_done: Whether observing, planning and comparing are over.
        reason: The last message.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        budget: str,
        policies: tuple[str, ...],
        most_slowdown: float | None,
        time_limit_s: float,
    ) -> None:
        """Stores the arguments; nothing is observed before `start`.

        Args:
            model: The model that is trained.
            optimizers: Its optimizers.
            budget: Maximum live bytes, as `parse_budget` reads it.
            policies: Names of the allowed policies.
            most_slowdown: Maximum increase of the step time, as a fraction; None for any.
            time_limit_s: Time limit of a search, in seconds.
        """
        self.plan: Plan | None = None
        self.job: Job | None = None
        self.predicted_bytes = 0
        self.measured_bytes = 0
        self.is_done = False
        self.reason = ""
        self._model, self._optimizers = model, optimizers
        self._budget, self._policies = budget, policies
        self._most_slowdown, self._time_limit_s = most_slowdown, time_limit_s
        self._process = os.getpid()
        self._observed: Observed | None = None
        self._step_ends = StepEnds(model, optimizers, self._after_step)
        self._basis: Basis | None = None
        self._recorded_bytes = 0
        self._budget_bytes = 0
        self._queue: PlanQueue | None = None
        self._chosen: Candidate | None = None
        self._attempts = 0
        self._least: tuple[int, str] = (0, "")
        self._watch: DevicePeak | None = None

    # -- lifecycle ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts observing. On failure, prints the error and leaves the job unmodified."""
        global _at_work  # noqa: PLW0603 - one recorder per process
        if child.is_recording():
            self._end(sentences.LEFT_TO_MEMPROF)
            return
        if _at_work is not None:
            raise UsageError(sentences.AT_WORK_ALREADY)
        _at_work = self
        atexit.register(self._at_exit)
        try:
            self._observed = Observed()
            # Installed after the recorder's own hooks, which end the step.
            self._step_ends.install()
        except (MemprofError, OSError) as error:
            self._give_up(f"make_fit cannot observe the job: {error}")

    def undo(self) -> None:
        """Stops whatever is in progress, and reverts all changes to the job."""
        self._stop()
        if self.job is not None:
            self.job.undo()
        self.job = self.plan = None

    def _after_step(self) -> None:
        """Advances to the next stage; errors here must not end the training."""
        try:
            self._advance()
        except MemprofError as error:
            self._give_up(f"make_fit leaves the job as it is: {error}")
        except Exception as error:  # a bug in memprof
            if os.environ.get("MEMPROF_DEBUG", "") not in ("", "0"):
                raise
            self._give_up(sentences.our_fault(error))
        except BaseException:
            self._stop()  # the job is being interrupted
            raise

    def _advance(self) -> None:
        if self._watch is not None:
            peak = self._watch.exceeded()
            if peak:
                _warn(sentences.later_step_took(peak, self.measured_bytes, self._budget_bytes))
            return
        if self._observed is None:
            return
        self._observed.end_step()
        if not self._observed.is_over:
            return
        trace = self._observed.read()
        basis, measured = basis_of_steps(trace), measure(trace)
        self._observed.discard()
        self._observed = None
        if self._basis is None:
            self._begin(basis, measured)
        else:
            self._compare(measured)

    # -- planning -----------------------------------------------------------------------------------------------

    def _begin(self, basis: Basis, measured: Measured) -> None:
        """Plans from the observed steps, and applies the plan."""
        device = _device_of(self._model)
        if device.type != "cpu" and not basis.step.is_on_device():
            raise InconclusiveError(f"recording on {device.type} is not supported.")
        self._recorded_bytes = self.measured_bytes = measured.peak_bytes
        self._budget_bytes = parse_budget(self._budget, measured.peak_bytes)
        if measured.peak_bytes <= self._budget_bytes:
            self._end(sentences.job_fits(measured.peak_bytes, self._budget_bytes, device.type))
            return
        self._basis = basis
        search_request = SearchRequest(
            budget_bytes=self._budget_bytes,
            allow=self._policies,
            most_slowdown=self._most_slowdown,
            time_limit_s=self._time_limit_s,
        )
        first = self._search(search_request)
        self._least = (first.least.peak_bytes, first.least.plan.describe())
        self._queue = PlanQueue(first, self._search)
        self._apply_next()

    def _search(self, search_request: SearchRequest) -> SearchResult:
        assert self._basis is not None  # set before planning
        answer = explore(self._basis.step, search_request, others=self._basis.others)
        if answer.was_interrupted:
            raise KeyboardInterrupt  # the search treats Ctrl-C as its own end; here it is meant for the training
        return answer

    def _apply_next(self) -> None:
        """Applies the fastest remaining plan that fits the model, and starts measuring; finishes if there is none."""
        assert self._basis is not None  # set before planning
        assert self._queue is not None
        while self._attempts < _MOST_ATTEMPTS:
            one = self._queue.next()
            if one is None:
                break
            job = Job(self._model, self._optimizers)
            try:
                wanted = dataclasses.replace(one.plan, budget_bytes=self._budget_bytes)
                plan = plan_for(wanted, type(self._model).__name__, job.modules_named())
                apply_to(plan, plan, job)
            except PolicyError:
                self._queue.note_refused(one)  # the next one may fit
                continue
            self._attempts += 1
            self.plan, self.job, self._chosen = plan, job, one
            self.predicted_bytes = one.peak_bytes
            recorded_us = self._basis.step.duration_us
            self._say(sentences.plan_applied(one, self._budget_bytes, self._recorded_bytes, recorded_us))
            self._observed = Observed()
            return
        self._give_up(sentences.nothing_fits(self._budget_bytes, self._recorded_bytes, self._least, self._policies))

    def _compare(self, measured: Measured) -> None:
        """Compares the plan's prediction with the measurement."""
        one = self._chosen
        assert one is not None  # a plan is in force
        assert self._queue is not None
        self.measured_bytes = measured.peak_bytes
        if measured.peak_bytes <= self._budget_bytes:
            device_type = _device_of(self._model).type
            self._end(sentences.plan_held(measured.peak_bytes, one.peak_bytes, self._budget_bytes, device_type))
            return
        _warn(sentences.plan_did_not_hold(one, measured.peak_bytes, self._budget_bytes))
        self._least = min(self._least, (measured.peak_bytes, one.plan.describe()))
        self._take_back()
        self._queue.note_above(one, measured.peak_bytes)
        self._apply_next()

    def _take_back(self) -> None:
        if self.job is not None:
            self.job.undo()
        self.job = self.plan = self._chosen = None

    # -- afterwards ---------------------------------------------------------------------------------------------

    def _end(self, sentence: str) -> None:
        """Finishes: prints the result, and on a CUDA device keeps watching its counter."""
        self._say(sentence)
        device = _device_of(self._model)
        if device.type == "cuda" and self._budget_bytes:
            self._watch = DevicePeak(device, max(self.measured_bytes, self.predicted_bytes))
            self._release()
        else:
            self._stop()

    def _give_up(self, sentence: str) -> None:
        self._take_back()
        self._stop()
        self.reason = sentence
        _warn(sentence)

    def _say(self, sentence: str) -> None:
        self.reason = sentence
        if sys.stderr is not None:
            print(f"memprof: {sentence}", file=sys.stderr, flush=True)

    def _stop(self) -> None:
        """Removes all hooks."""
        self._step_ends.remove()
        self._watch = None
        self._release()

    def _release(self) -> None:
        global _at_work  # noqa: PLW0603 - one recorder per process
        if self._observed is not None:
            self._observed.discard()
        self._observed = self._basis = self._queue = None
        self.is_done = True
        atexit.unregister(self._at_exit)
        if _at_work is self:
            _at_work = None

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            return
        self._stop()
        self._say(sentences.ended_early(has_plan=self.plan is not None))


def _device_of(model: torch.nn.Module) -> torch.device:
    return Job(model).device


def _warn(sentence: str) -> None:
    warnings.warn(f"memprof: {sentence}", stacklevel=2)
