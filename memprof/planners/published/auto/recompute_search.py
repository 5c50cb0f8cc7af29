"""The search for schedules that only recompute: every fast planner, an exact model that grows, and annealing."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import numpy as np

from memprof.planners.base import Planner, ScheduleRequest, ScheduleResult
from memprof.planners.graph.graph import needed_bytes
from memprof.planners.graph.schedule import replay
from memprof.planners.published.auto.cuts import CutModel, Solution
from memprof.planners.published.auto.improve import Choice, Front, drop_until_fits, exchange
from memprof.planners.published.auto.moves import Moves
from memprof.planners.published.auto.repeats import Repeats, repeats_in
from memprof.planners.published.dtr import Dtr
from memprof.trace.schema import Floats, Ints
from memprof.units import format_bytes

#: Cuts in the first model, and rounds in which it grows.
_FIRST_CUTS = 16
_ROUNDS = 60
#: In rounds that decide only part of the step: the divisor of the stretch decided, 0 for where solutions disagree.
_STRETCHES = (0, 8, 5, 8)
#: Rounds in which everything is decided at once, as long as that is fast.
_WHOLE_ROUNDS = 6
#: Above this many columns, keep decisions are not integers: a step of a few thousand operators.
_MOST_COLUMNS = 30_000
#: Proved optimal: within the solver's own tolerance.
_GAP = 2e-6
#: On steps with more values than the first number, the search stops at the second as its gap.
_SMALL_VALUES, _LARGE_GAP = 120, 2e-4
#: From this many values on, the slower heuristics of DTR do not finish in a minute.
_HUGE_VALUES = 30_000
#: Share of the time used on such steps.
_HUGE_SHARE = 0.8
#: Above this many values, dropping one by one takes longer than the relaxed model and finds nothing better.
_MOST_GREEDY_VALUES = 1_000
#: Moves drawn beside the other parts of the search, and at most for each value.
_STEPS, _STEPS_A_VALUE = 200_000, 2_000
#: The final annealing ends where fewer moves than these are left, or fit into the time left.
_FEWEST_MOVES = 1_000
#: Rounds of the search for the smallest peak, and rounds without progress after which a search stops.
_LEAST_ROUNDS, _IDLE_ROUNDS = 8, 8
#: Up to this many values the full programme is solved for what is still open, in this share of the time left.
_EXACT_VALUES, _EXACT_SHARE = 64, 0.4
_SEED = 0


class _QuickDtr(Dtr):
    """The heuristics whose run time grows least with the step, fastest first."""

    heuristics = ("local", "eq-class")


class RecomputeSearch:
    """One search and its results so far."""

    def __init__(self, task: ScheduleRequest, most_moves: int | None) -> None:
        self.graph = task.graph
        if self.graph.values > _HUGE_VALUES:  # parts of the search that do not look at the clock take seconds
            now = time.monotonic()
            task = replace(task, deadline=now + _HUGE_SHARE * max(0.0, task.deadline - now))
        self.task = task
        self.most_moves = most_moves
        self.budget = task.budget_bytes
        self.front = Front()
        self.moves = Moves(Repeats(self.graph), random.Random(_SEED))
        self.recorded_bytes = self.moves.state.bytes.copy()
        self.front.add(Choice(int(self.recorded_bytes.max(initial=0)), 0.0, ()))
        self.bound_us = 0.0
        # Schedules that ``Repeats`` cannot represent: their order within a stage differs.
        self.other: tuple[float, Ints] | None = None

    def found(self) -> ScheduleResult:
        """Runs the search to its end."""
        needed = needed_bytes(self.graph)
        if needed > self.budget:
            return self._impossible(f"A single operator with its inputs and outputs needs {format_bytes(needed)}.")
        self.cuts = self._first_cuts()
        if self.graph.values <= _HUGE_VALUES:  # DTR always returns a result
            self._run_planner(Dtr(), 0.15)
        else:
            self._run_planner(_QuickDtr(), 0.5)
        if not self._bounded(CutModel(self.graph, self.cuts), whole=False, seconds=20.0).is_feasible:
            return self._impossible("No schedule stays within the budget at several operators of the step at once.")
        self._refine(0.02)
        if not self._is_done():
            self._start()
        if not self._is_done():
            self._try_others()
        if not self._is_done() and not self._grow():
            return self._impossible("No schedule stays within the budget at several operators of the step at once.")
        # On a small step the full programme also models what is alive while an operator repeats.
        if self.graph.values <= _EXACT_VALUES and not self._is_done():
            from memprof.planners.published.checkmate import Checkmate

            self._run_planner(Checkmate(), _EXACT_SHARE)
        self.anneal()
        return self._answer()

    def _answer(self) -> ScheduleResult:
        least = 0 if self._least_us() < float("inf") else self._least_found()
        best = self._best()
        if best is None:
            status = "time limit" if self.task.is_late() else "nothing found"
            return ScheduleResult(
                status, "No fitting schedule found; infeasibility not proved.", None, self.bound_us, least
            )
        extra_us, runs = best
        percent = 100.0 * (extra_us - self.bound_us) / (self.graph.duration_us + self.bound_us or 1.0)
        if self._least_us() <= self.bound_us * (1.0 + _GAP) + 1e-6:
            return ScheduleResult(
                "optimal", "Proved optimal: no schedule within the budget is faster.", runs, self.bound_us, self.budget
            )
        reason = f"Proved within {percent:.2g} % of the optimum."
        return ScheduleResult(
            "time limit" if self.task.is_late() else "found", reason, runs, self.bound_us, self.budget
        )

    def _impossible(self, why: str) -> ScheduleResult:
        return ScheduleResult("infeasible", why, None, 0.0, self._least_found())

    def _best(self) -> tuple[float, Ints] | None:
        """Returns time and schedule of the fastest that fits, by replay."""
        choice = self.front.best(self.budget)
        best = self.other
        if choice is not None and (best is None or choice.extra_us < best[0]):
            self.moves.load(list(choice.repeats))
            done = replay(self.graph, self.moves.state.runs())
            best = (done.extra_us, done.runs)
        return best

    def _least_us(self) -> float:
        least = self.front.least_us(self.budget)
        return least if self.other is None else min(least, self.other[0])

    def _is_done(self) -> bool:
        """Returns whether the remaining gap is not worth more time."""
        gap = _GAP if self.graph.values <= _SMALL_VALUES else _LARGE_GAP
        return self.task.is_late() or self._least_us() <= self.bound_us * (1.0 + gap) + 1e-6

    def _start(self) -> None:
        """Drops greedily from the recorded step; on large steps only if nothing else was found."""
        if self.graph.values > _MOST_GREEDY_VALUES and self._least_us() < float("inf"):
            return
        self.moves.load([])
        drop_until_fits(self.moves, self.front, self.task, self.budget)

    def _least_found(self) -> int:
        """Returns the smallest peak found in a search for small peaks, which does not depend on the budget."""
        moves, front = Moves(Repeats(self.graph), random.Random(_SEED)), Front()
        front.add(Choice(moves.state.peak_bytes, 0.0, ()))
        drop_until_fits(moves, front, self.task, needed_bytes(self.graph))
        for _ in range(_LEAST_ROUNDS):
            least = front.choices[0]
            moves.load(list(least.repeats))
            exchange(moves, front, self.task, int(least.peak_bytes * 0.97), steps=self._steps(0.1))
            if front.choices[0].peak_bytes == least.peak_bytes or self.task.is_late():
                break
        for choice in front.choices:
            self.front.add(choice)
        return front.choices[0].peak_bytes

    def _try_others(self) -> None:
        """Runs the fast planners and improves what they find."""
        from memprof.planners.published.bptt import Bptt
        from memprof.planners.published.chain import Chain
        from memprof.planners.published.knapsack import Knapsack
        from memprof.planners.published.selective import Selective
        from memprof.planners.published.sqrt import Sqrt

        kinds: tuple[type[Planner], ...] = (Sqrt, Selective, Knapsack)
        if self.graph.values <= _HUGE_VALUES:  # finding the lines of a huge step takes longer than its share
            kinds = (*kinds, Bptt, Chain)
        for kind in kinds:
            self._run_planner(kind(), 0.15)

    def _run_planner(self, planner: Planner, share: float) -> None:
        """Runs another planner in a share of the time left and keeps its schedule and its proof."""
        now = time.monotonic()
        part = replace(self.task, deadline=now + share * max(0.0, self.task.deadline - now))
        found = planner.search(part)
        self.bound_us = max(self.bound_us, found.bound_us)
        if found.runs is not None:
            self._take(found.runs)

    def _take(self, runs: Ints) -> None:
        done = replay(self.graph, runs)
        if done.peak_bytes <= self.budget and done.extra_us < self._least_us():
            self.other = (done.extra_us, runs)
        self.moves.load(repeats_in(self.graph, runs))
        self._refine(0.02)

    def _steps(self, share: float) -> int:
        """Returns the number of moves in a share of the search: fewer on small steps and on slow large ones."""
        return int(share * min(_STEPS, _STEPS_A_VALUE * self.graph.values) / (1.0 + self.graph.ops / 2000.0))

    def _refine(self, share: float) -> None:
        if drop_until_fits(self.moves, self.front, self.task, self.budget):
            exchange(self.moves, self.front, self.task, self.budget, steps=self._steps(share))

    def anneal(self) -> None:
        """Anneals the best schedule again and again, with more moves each time, until it is proved or time is up."""
        left = float("inf") if self.most_moves is None else self.most_moves
        moves, a_second = self._steps(1.0), float("inf")
        while not self._is_done() and self._least_us() < float("inf"):
            # A round that is cut off is lost: it ends before it has cooled down.
            count = int(min(moves, left, max(0.0, a_second * self._seconds(float("inf")))))
            if count < _FEWEST_MOVES:
                break
            self._load_best()
            began = time.monotonic()
            exchange(self.moves, self.front, self.task, self.budget, steps=count)
            a_second = count / max(time.monotonic() - began, 1e-3)
            left -= count
            moves *= 2

    def _load_best(self) -> None:
        """Switches to the fastest schedule that fits; to its nearest where the moves cannot represent it."""
        choice = self.front.best(self.budget)
        if self.other is not None and (choice is None or self.other[0] < choice.extra_us):
            self.moves.load(repeats_in(self.graph, self.other[1]))
        elif choice is not None:
            self.moves.load(list(choice.repeats))

    def _first_cuts(self) -> list[int]:
        """Spreads cuts over the stages that exceed the budget as recorded."""
        above = np.flatnonzero(self.recorded_bytes > self.budget)
        fewest = 4 if self.graph.values <= _HUGE_VALUES else 1
        count = max(fewest, min(_FIRST_CUTS, _MOST_COLUMNS // max(2 * self.graph.values, 1)))
        places = np.linspace(0, len(above) - 1, min(count, len(above))).astype(int)
        return sorted({int(self.recorded_bytes.argmax()), *above[places].tolist()})

    def _seconds(self, most: float) -> float:
        return min(most, self.task.deadline - time.monotonic())

    def _bounded(self, model: CutModel, *, whole: bool, seconds: float) -> Solution:
        """Solves the model, raises the bound and loads its schedule."""
        answer = model.solve(self.budget, whole=whole, seconds=self._seconds(seconds))
        self.bound_us = max(self.bound_us, answer.bound_us)
        if answer.repeats is not None:
            self.moves.load(list(answer.repeats))
        return answer

    def _grow(self) -> bool:
        """Solves the model and adds cuts where its schedule exceeds the budget, repeatedly; False if nothing fits.

        Once integer solutions are no longer found quickly, only decisions where the relaxation disagrees are re-solved.
        """
        cuts = self.cuts
        whole_rounds = _WHOLE_ROUNDS if len(cuts) * 2 * self.graph.values <= _MOST_COLUMNS else 0
        idle = 0
        for number in range(_ROUNDS):
            before = self._least_us()
            model = CutModel(self.graph, cuts)
            answer = self._bounded(model, whole=False, seconds=20.0)
            if not answer.is_feasible:
                return False
            if number < whole_rounds:
                seconds = self._seconds(8.0)
                began = time.monotonic()
                if not self._bounded(model, whole=True, seconds=seconds).is_feasible:
                    return False
                if time.monotonic() - began >= 0.9 * seconds:
                    whole_rounds = 0
            elif answer.values is not None:
                self._decide_near(model, answer.values, number)
            more = self._stages_above()
            self._refine(0.05)
            idle = 0 if self._least_us() < before or set(more) - set(cuts) else idle + 1
            if self._is_done() or idle == _IDLE_ROUNDS:
                break
            cuts = sorted({*cuts, *more})
        return True

    def _decide_near(self, model: CutModel, relaxed: Floats, number: int) -> None:
        """Re-solves where the best schedule and the relaxed solution disagree, or one stretch of the step.

        Source: Danna 2005, Exploring relaxation induced neighborhoods to improve MIP solutions, section 2.
        """
        choice = self.front.best(self.budget)
        if choice is None:
            return
        self.moves.load(list(choice.repeats))
        now = model.decisions_of(self.moves.state)
        graph, draw = self.graph, self.moves.draw
        makers = np.unique(graph.value_op[graph.can_repeat[graph.value_op]])
        # In turn: where they disagree, and stretches short enough to solve in about a second.
        if (part := _STRETCHES[number % len(_STRETCHES)]) == 0:
            is_open = np.abs(relaxed - now) > 0.01
        else:
            length = max(8, len(makers) // part)
            first = draw.randrange(max(1, len(makers) - length + 1))
            stretch = np.zeros(graph.ops, dtype=np.bool_)
            stretch[makers[first : first + length]] = True
            is_open = model.decisions_on(stretch)
        answer = model.solve(self.budget, whole=True, seconds=self._seconds(5.0), fixed=(~is_open, now))
        if answer.repeats is not None:
            self.moves.load(list(answer.repeats))

    def _stages_above(self) -> list[int]:
        """Returns the worst stage of each stretch above the budget."""
        stages = np.flatnonzero(self.moves.state.bytes > self.budget)
        stretches = np.split(stages, np.flatnonzero(np.diff(stages) > 1) + 1)
        return [int(stretch[self.moves.state.bytes[stretch].argmax()]) for stretch in stretches if len(stretch)]
