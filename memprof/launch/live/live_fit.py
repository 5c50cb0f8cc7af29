"""A model on its way to fit a budget: observes, plans, applies and compares between the steps of its training."""

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
from memprof.launch.fit.attempt import Measured, measure
from memprof.launch.fit.candidates import Candidates
from memprof.launch.live import sentences
from memprof.launch.live.device_peak import DevicePeak
from memprof.launch.live.observed import Observed
from memprof.launch.live.policies import plan_for
from memprof.launch.live.step_ends import StepEnds
from memprof.machines.budget import parse_budget
from memprof.planners.search.explore import SearchRequest, SearchResult, explore
from memprof.planners.search.tried import Candidate
from memprof.policies.plan.plan import Plan
from memprof.policies.runtime.job import Job

#: Plans that are applied and measured before the job is left as it is.
_MOST_ATTEMPTS = 4
#: The one at work in this process, which records: two recorders would record each other.
_at_work: LiveFit | None = None


class LiveFit:
    """A model on its way to fit a budget, while it trains.

    It observes four steps, plans and applies between two steps, and observes four more to compare. Then no hook is
    left; on a CUDA device one counter is read after each update.

    Attributes:
        plan: The plan in force, None where there is none.
        job: What the plan was applied to: its notes, and ``undo()``; None where there is none.
        predicted_bytes: Peak that the plan was predicted to lead to.
        measured_bytes: Peak of the step measured under it; of the job as it is where there is no plan.
        is_done: Whether it is through with observing, planning and comparing.
        reason: What it said last.
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
        """Prepares.

        Args:
            model: The model that is trained.
            optimizers: Its optimizers.
            budget: Most bytes that may be allocated at once, as `parse_budget` reads it.
            policies: Names of the policies that may be used.
            most_slowdown: Most time that a step may take beyond what it takes now, as a share; None for any.
            time_limit_s: Longest time that a search takes.
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
        self._candidates: Candidates | None = None
        self._chosen: Candidate | None = None
        self._attempts = 0
        self._least: tuple[int, str] = (0, "")
        self._watch: DevicePeak | None = None

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to observe. What fails here is told, and the job left as it is."""
        global _at_work  # noqa: PLW0603 - one recorder a process
        if child.is_recording():
            self._end(sentences.LEFT_TO_MEMPROF)
            return
        if _at_work is not None:
            raise UsageError(sentences.AT_WORK_ALREADY)
        _at_work = self
        atexit.register(self._at_exit)
        try:
            self._observed = Observed()
            # After the recorder's own, which ends the step.
            self._step_ends.install()
        except (MemprofError, OSError) as error:
            self._give_up(f"make_fit cannot observe the job: {error}")

    def undo(self) -> None:
        """Ends whatever it does, and takes back what it did to the job."""
        self._stop()
        if self.job is not None:
            self.job.undo()
        self.job = self.plan = None

    def _after_step(self) -> None:
        """Goes on; the training must not end by what fails here."""
        try:
            self._advance()
        except MemprofError as error:
            self._give_up(f"make_fit leaves the job as it is: {error}")
        except Exception as error:  # a fault of ours
            if os.environ.get("MEMPROF_DEBUG", "") not in ("", "0"):
                raise
            self._give_up(sentences.our_fault(error))
        except BaseException:
            self._stop()  # the job is being interrupted
            raise

    def _advance(self) -> None:
        if self._watch is not None:
            self._look_at_device(self._watch)
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
        """Plans from the job's own steps, and applies the plan."""
        device = _device_of(self._model)
        if device.type != "cpu" and not basis.step.is_on_device():
            raise InconclusiveError(f"what is allocated on {device.type} is not recorded yet.")
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
        self._candidates = Candidates(first, self._search)
        self._apply_next()

    def _search(self, search_request: SearchRequest) -> SearchResult:
        assert self._basis is not None  # planning begins with it
        answer = explore(self._basis.step, search_request, others=self._basis.others)
        if answer.was_interrupted:
            raise KeyboardInterrupt  # a search takes it for its own end; here it is meant for the training
        return answer

    def _apply_next(self) -> None:
        """Applies the fastest plan that is left and fits the model, and begins to measure; or ends."""
        assert self._basis is not None  # plans are made from it
        assert self._candidates is not None
        while self._attempts < _MOST_ATTEMPTS:
            one = self._candidates.next()
            if one is None:
                break
            job = Job(self._model, self._optimizers)
            try:
                wanted = dataclasses.replace(one.plan, budget_bytes=self._budget_bytes)
                plan = plan_for(wanted, type(self._model).__name__, job.modules_named())
                apply_to(plan, plan, job)
            except PolicyError:
                self._candidates.note_refused(one)  # the next one may fit
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
        """Holds the plan to what was measured under it."""
        one = self._chosen
        assert one is not None  # a plan is in force
        assert self._candidates is not None
        self.measured_bytes = measured.peak_bytes
        if measured.peak_bytes <= self._budget_bytes:
            device_type = _device_of(self._model).type
            self._end(sentences.plan_held(measured.peak_bytes, one.peak_bytes, self._budget_bytes, device_type))
            return
        _warn(sentences.plan_did_not_hold(one, measured.peak_bytes, self._budget_bytes))
        self._least = min(self._least, (measured.peak_bytes, one.plan.describe()))
        self._take_back()
        self._candidates.note_above(one, measured.peak_bytes)
        self._apply_next()

    def _take_back(self) -> None:
        if self.job is not None:
            self.job.undo()
        self.job = self.plan = self._chosen = None

    # -- afterwards ---------------------------------------------------------------------------------------------

    def _look_at_device(self, watch: DevicePeak) -> None:
        peak = watch.exceeded()
        if peak:
            _warn(sentences.later_step_took(peak, self.measured_bytes, self._budget_bytes))

    def _end(self, sentence: str) -> None:
        """Is through: says so, and on a CUDA device goes on reading its counter."""
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
        """Takes every hook away."""
        self._step_ends.remove()
        self._watch = None
        self._release()

    def _release(self) -> None:
        global _at_work  # noqa: PLW0603 - one recorder a process
        if self._observed is not None:
            self._observed.discard()
        self._observed = self._basis = self._candidates = None
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
