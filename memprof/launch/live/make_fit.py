"""Makes a model fit a budget from the user's own code: `memprof.make_fit(model, optimizer, budget="8GiB")`."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from memprof.analysis.suggest import steady_step
from memprof.errors import InconclusiveError, MemprofError, PolicyError, UsageError
from memprof.launch import child
from memprof.launch.apply import apply_to, optimizers_in
from memprof.launch.fit.attempt import Measured, measure
from memprof.launch.fit.shortlist import Shortlist
from memprof.launch.live.device_peak import DevicePeak
from memprof.launch.live.observed import Observed
from memprof.launch.live.policies import live_policies, plan_for
from memprof.machines.budget import parse_budget
from memprof.planners.space.explore import Wish, explore
from memprof.planners.space.frames import is_on_device
from memprof.planners.space.tried import Tried
from memprof.policies.job import Job
from memprof.policies.plan import Plan
from memprof.policies.wrappers import unwrapped
from memprof.recorder.rounds import OptimizerRounds
from memprof.recorder.update_hooks import UpdateHooks
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from memprof.units import format_bytes

#: Plans that are applied and measured before the job is left as it is.
_MOST_ATTEMPTS = 4
#: A peak to read a budget against before any was recorded, so that a mistake in it is told at once.
_SOME_PEAK_BYTES = 1 << 40

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
        """Prepares; see `make_fit`."""
        self.plan: Plan | None = None
        self.job: Job | None = None
        self.predicted_bytes = 0
        self.measured_bytes = 0
        self.is_done = False
        self.reason = ""
        self._model, self._optimizers = model, optimizers
        self._budget, self._policies = budget, policies
        self._most_slowdown, self._time_limit_s = most_slowdown, time_limit_s
        self._process, self._thread = os.getpid(), threading.get_ident()
        self._observed: Observed | None = None
        self._updates = UpdateHooks(None, self._after_update)
        self._rounds = OptimizerRounds()
        self._rounds.meet(optimizers)
        self._own: set[int] = set()
        self._step: Step | None = None
        self._recorded_bytes = 0
        self._budget_bytes = 0
        self._shortlist: Shortlist | None = None
        self._searched: set[Wish] = set()
        self._chosen: Tried | None = None
        self._attempts = 0
        self._least: tuple[int, str] = (0, "")
        self._watch: DevicePeak | None = None

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to observe. What fails here is told, and the job left as it is."""
        global _at_work  # noqa: PLW0603 - one recorder a process
        if child.is_recording():
            self._end("make_fit leaves the job as it is while memprof record or memprof fit runs it.")
            return
        if _at_work is not None:
            raise UsageError(
                "make_fit is at work in this process already. Give it several models as one torch.nn.ModuleList, and "
                "their optimizers as a list."
            )
        _at_work = self
        atexit.register(self._at_exit)
        try:
            self._observed = Observed()
            # After the recorder's own, which ends the step.
            self._updates.install()
        except (MemprofError, OSError) as error:
            self._give_up(f"make_fit cannot observe the job: {error}")

    def undo(self) -> None:
        """Ends whatever it does, and takes back what it did to the job."""
        self._stop()
        if self.job is not None:
            self.job.undo()
        self.job = self.plan = None

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        """Goes on where a step has ended."""
        is_mine = os.getpid() == self._process and threading.get_ident() == self._thread
        # Within backward a step has not ended, even where an optimizer updates there.
        if not is_mine or torch._C._current_graph_task_id() != -1 or not self._is_of_model(optimizer):
            return
        if not self._updates.is_last() or not self._rounds.update(optimizer):
            return
        self._rounds.begin_step()
        try:
            self._advance()
        except MemprofError as error:
            self._give_up(f"make_fit leaves the job as it is: {error}")
        except Exception as error:  # the training must not end by our faults
            if os.environ.get("MEMPROF_DEBUG", "") not in ("", "0"):
                raise
            self._give_up(
                f"make_fit leaves the job as it is: {type(error).__name__}: {error}. This is a fault of memprof, not "
                "of your job; MEMPROF_DEBUG=1 shows where it is."
            )
        except BaseException:
            self._stop()  # the job is being interrupted
            raise

    def _is_of_model(self, optimizer: Any) -> bool:
        """Whether an optimizer updates the model: given ones may be wrappers of those that report."""
        if not self._own:
            self._own = {id(parameter) for parameter in self._model.parameters()}
        return any(id(parameter) in self._own for group in optimizer.param_groups for parameter in group["params"])

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
        step, measured = steady_step(trace, None), measure(trace)
        self._observed.discard()
        self._observed = None
        if self._step is None:
            self._begin(step, measured)
        else:
            self._compare(measured)

    # -- planning -----------------------------------------------------------------------------------------------

    def _begin(self, step: Step, measured: Measured) -> None:
        """Plans from the job's own steps, and applies the plan."""
        device = _device_of(self._model)
        if device.type != "cpu" and not is_on_device(step):
            raise InconclusiveError(f"what is allocated on {device.type} is not recorded yet.")
        self._recorded_bytes = self.measured_bytes = measured.peak_bytes
        self._budget_bytes = parse_budget(self._budget, measured.peak_bytes)
        if measured.peak_bytes <= self._budget_bytes:
            peak, budget = format_bytes(measured.peak_bytes), format_bytes(self._budget_bytes)
            self._end(
                f"make_fit: the job fits as it is, its peak of {peak} is within {budget}.{self._what_is_watched()}"
            )
            return
        self._step = step
        # What the other steps need beyond the one that plans are made from, they need under a plan as well.
        excess = max(0, measured.peak_bytes - int(live_bytes(step).during.max(initial=0)))
        wish = Wish(
            budget_bytes=max(1, self._budget_bytes - excess),
            allow=self._policies,
            most_slowdown=self._most_slowdown,
            time_limit_s=self._time_limit_s,
        )
        self._shortlist = Shortlist(wish)
        self._search(wish)
        self._apply_next()

    def _search(self, wish: Wish) -> None:
        assert self._step is not None  # planning begins with it
        assert self._shortlist is not None
        self._searched.add(wish)
        answer = explore(self._step, wish)
        if answer.was_stopped and answer.took_s < wish.time_limit_s:
            raise KeyboardInterrupt  # a search takes it for its own end; here it is meant for the training
        self._shortlist.add(answer)
        if not self._least[1]:
            self._least = (answer.least.peak_bytes, answer.least.plan.describe())

    def _apply_next(self) -> None:
        """Applies the fastest plan that is left and fits the model, and begins to measure; or ends."""
        assert self._shortlist is not None
        while self._attempts < _MOST_ATTEMPTS:
            one = self._shortlist.next()
            if one is None:
                tighter = self._shortlist.tightened(self._searched)
                if tighter is None:
                    break
                self._search(tighter)
                continue
            job = Job(self._model, self._optimizers)
            try:
                plan = plan_for(one.plan, type(self._model).__name__, job.modules_named())
                apply_to(plan, plan, job)
            except PolicyError:
                self._shortlist.note_refused(one)  # the next one may fit
                continue
            self._attempts += 1
            self.plan, self.job, self._chosen = plan, job, one
            self.predicted_bytes = one.peak_bytes
            self._say(self._describe_plan(one))
            self._observed = Observed()
            return
        least, plan_text = self._least
        budget, was = format_bytes(self._budget_bytes), format_bytes(self._recorded_bytes)
        self._give_up(
            f"make_fit found no plan within {budget} and leaves the job as it is, with a peak of {was}: the least "
            f"found is {format_bytes(least)} with {plan_text} (allowed: {', '.join(self._policies)})."
        )

    def _compare(self, measured: Measured) -> None:
        """Holds the plan to what was measured under it."""
        assert self._chosen is not None  # a plan is in force
        assert self._shortlist is not None
        self.measured_bytes = measured.peak_bytes
        peak, budget = format_bytes(measured.peak_bytes), format_bytes(self._budget_bytes)
        predicted = format_bytes(self.predicted_bytes)
        if measured.peak_bytes <= self._budget_bytes:
            self._end(
                f"make_fit: measured peak {peak}, predicted {predicted}, within {budget}. Nothing is recorded from "
                f"here on.{self._what_is_watched()}"
            )
            return
        _warn(
            f"make_fit: a step under {self._chosen.plan.describe()} took {peak}, predicted were {predicted}, and the "
            f"budget is {budget}; trying another plan."
        )
        self._shortlist.note_above(self._chosen, measured.peak_bytes)
        self._least = min(self._least, (measured.peak_bytes, self._chosen.plan.describe()))
        self._take_back()
        tighter = self._shortlist.tightened(self._searched)
        if tighter is not None:
            self._search(tighter)
        self._apply_next()

    def _take_back(self) -> None:
        if self.job is not None:
            self.job.undo()
        self.job = self.plan = self._chosen = None

    # -- afterwards ---------------------------------------------------------------------------------------------

    def _look_at_device(self, watch: DevicePeak) -> None:
        peak = watch.exceeded()
        if peak:
            budget = format_bytes(self._budget_bytes)
            expected = format_bytes(self.measured_bytes)
            above = "above" if peak > self._budget_bytes else "within"
            _warn(
                f"make_fit: a step took {format_bytes(peak)}, more than the {expected} seen so far; that is {above} "
                f"the budget of {budget}."
            )

    def _what_is_watched(self) -> str:
        if _device_of(self._model).type == "cuda":
            return ""
        return " Later steps are not watched: on a CPU nothing counts what is allocated but a recorder."

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
        self._updates.remove()
        self._watch = None
        self._release()

    def _release(self) -> None:
        global _at_work  # noqa: PLW0603 - one recorder a process
        if self._observed is not None:
            self._observed.discard()
        self._observed = self._step = self._shortlist = None
        self.is_done = True
        atexit.unregister(self._at_exit)
        if _at_work is self:
            _at_work = None

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            return
        before = (
            "the plan in force was measured" if self.plan is not None else "enough steps were observed to plan from"
        )
        self._stop()
        self._say(f"make_fit: the job ended before {before}.")

    def _describe_plan(self, one: Tried) -> str:
        assert self._step is not None  # plans are made from it
        change = one.step_time_us / self._step.duration_us - 1 if self._step.duration_us else 0.0
        return (
            f"make_fit: applied {one.plan.describe()}; predicted peak {format_bytes(one.peak_bytes)} of "
            f"{format_bytes(self._budget_bytes)}, was {format_bytes(self._recorded_bytes)}; step time "
            f"{100 * change:+.0f} %. The next steps are measured."
        )


def make_fit(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    budget: str | int,
    *,
    allow: Iterable[str] = (),
    forbid: Iterable[str] = (),
    max_slowdown: float | None = None,
    time_limit: float = 30.0,
) -> LiveFit:
    """Makes a training job fit a budget, while it trains.

        memprof.make_fit(model, optimizer, budget="8GiB")

    Call it before the loop. It observes the first steps, searches for the fastest plan that fits, applies it to the
    model between two steps, says so, and compares a step under it with what was predicted. Where the job fits, or
    nothing fits, it is left as it is. Losses stay the same to the bit, unless policies are allowed that change them.

    Args:
        model: The model that is trained.
        optimizer: Its optimizer, or several.
        budget: Most bytes that may be allocated at once: ``"8GiB"``, ``"60%"`` of what the job needs, or a number.
        allow: Names of policies that may be used instead of checkpoint and swap; precision, loss and compress change
            the numbers.
        forbid: Names of policies that may not be used.
        max_slowdown: Most time that a step may take beyond what it takes now: 0.15 for 15 %.
        time_limit: Longest time that a search takes, in seconds.

    Returns:
        What it did so far; ``undo()`` takes it back.

    Raises:
        UsageError: The budget makes no sense, or another make_fit is at work.
        PolicyError: A policy is named that there is not, or that cannot be applied in the middle of training.
    """
    if not isinstance(model, torch.nn.Module):
        raise PolicyError(f"make_fit takes a torch.nn.Module, not a {type(model).__name__}.")
    optimizers = optimizers_in(optimizer)
    if not optimizers:
        raise PolicyError("make_fit needs the optimizer: its updates tell where steps end.")
    parse_budget(str(budget), _SOME_PEAK_BYTES)
    if max_slowdown is not None and not 0 <= max_slowdown < float("inf"):
        raise UsageError(f"{max_slowdown!r} is no slowdown: write a share such as 0.15.")
    policies = live_policies(tuple(allow), tuple(forbid))
    made = LiveFit(unwrapped(model), optimizers, str(budget), policies, max_slowdown, time_limit)
    made.start()
    return made


def _device_of(model: torch.nn.Module) -> torch.device:
    return Job(model).device


def _warn(sentence: str) -> None:
    warnings.warn(f"memprof: {sentence}", stacklevel=2)
