"""Moves from one schedule to a neighbour: recompute a value, stop recomputing it, or do so in another stage."""

from __future__ import annotations

import random
from bisect import bisect_right
from itertools import pairwise

import numpy as np

from memprof.planners.published.auto.repeats import Repeat, Repeats

#: Probability that a missing input is recomputed too, rather than held until then.
_REMAKES = 0.75


class Moves:
    """Draws random moves on one schedule and applies them."""

    def __init__(self, state: Repeats, draw: random.Random) -> None:
        self.state = state
        self.draw = draw
        graph = state.graph
        last_read = graph.value_op.copy()
        np.maximum.at(last_read, graph.read_value, graph.read_op)
        is_far = last_read - graph.value_op > 1
        self.candidates: list[int] = np.flatnonzero(graph.can_repeat[graph.value_op] & is_far).tolist()
        self._placed: list[Repeat] = []
        self._place_of: dict[Repeat, int] = {}

    def load(self, repeats: list[Repeat]) -> None:
        """Switches to another schedule."""
        self.state.load(repeats)
        self._placed = self.state.repeats()
        self._place_of = {repeat: place for place, repeat in enumerate(self._placed)}

    def toggle(self, repeats: list[Repeat]) -> None:
        """Adds or removes repeats."""
        self.state.toggle(repeats)
        for repeat in repeats:
            place = self._place_of.pop(repeat, None)
            if place is None:
                self._place_of[repeat] = len(self._placed)
                self._placed.append(repeat)
            else:
                last = self._placed.pop()
                if last != repeat:
                    self._placed[place] = last
                    self._place_of[last] = place

    def step(self) -> list[Repeat]:
        """Applies one random move; returns the repeats that undo it, empty where no move was possible."""
        kind = self.draw.random()
        if not self._placed or kind < 0.35:
            return self._drop()
        if kind < 0.6:
            return self._keep()
        if kind < 0.8:
            return self._shift()
        done = self._keep()
        return _both(done, self._drop())

    def _drop(self) -> list[Repeat]:
        """Drops a value between two of its reads and recomputes it for the second."""
        if not self.candidates:
            return []
        value = self.draw.choice(self.candidates)
        state = self.state
        maker = state.maker[value]
        needed = [maker, *(stage for stage in state.needed_in(value) if stage not in state.stages[maker])]
        if len(needed) < 2:
            return []
        later_reads = [later for earlier, later in pairwise(needed) if later - earlier > 1]
        if not later_reads:
            return []
        stage = self.draw.choice(later_reads)
        if stage in state.stages[maker]:
            return []
        return self.make(maker, stage)

    def cost_of(self, value: int, stage: int) -> float:
        """Returns the time to recompute a value in a stage, with every input that is gone by then."""
        state = self.state
        seen = {state.maker[value]}
        stack = list(seen)
        cost_us = 0.0
        while stack:
            current = stack.pop()
            cost_us += state.cost_us[current]
            for source in state.read[current]:
                maker = state.maker[source]
                if maker not in seen and stage not in state.stages[maker] and not state.is_alive(source, stage):
                    seen.add(maker)
                    stack.append(maker)
        return cost_us

    def make(self, op_id: int, stage: int, *, extends: bool = True) -> list[Repeat]:
        """Repeats an operator in a stage, with the inputs that are gone.

        Args:
            op_id: The operator.
            stage: Where it repeats; must not repeat there yet.
            extends: Whether some missing inputs are held until then instead, at random.

        Returns:
            The repeats that were added.
        """
        state, added = self.state, {(op_id, stage): None}
        stack = [op_id]
        while stack:
            current = stack.pop()
            for value in state.read[current]:
                maker = state.maker[value]
                if (maker, stage) in added or maker == stage or stage in state.stages[maker]:
                    continue
                is_needed = maker in state.together[current]
                is_gone = not is_needed and not state.is_alive(value, stage)
                if is_needed or (is_gone and (not extends or self.draw.random() < _REMAKES)):
                    added[(maker, stage)] = None
                    stack.append(maker)
        done = list(added)
        self.toggle(done)
        return done

    def _keep(self) -> list[Repeat]:
        """Removes a repeat and those that only it needed."""
        return self._remove([self.draw.choice(self._placed)]) if self._placed else []

    def _remove(self, repeats: list[Repeat]) -> list[Repeat]:
        state = self.state
        done: list[Repeat] = []
        gone = dict.fromkeys(repeats)
        stack = list(gone)
        while stack:
            op_id, stage = stack.pop()
            for taker in state.takers[op_id]:
                if stage in state.stages[taker] and (taker, stage) not in gone:
                    gone[(taker, stage)] = None
                    stack.append((taker, stage))
        while gone:
            now = list(gone)
            self.toggle(now)
            done += now
            gone = {}
            for op_id, stage in now:
                for value in state.read[op_id]:
                    maker = state.maker[value]
                    stages = state.stages[maker]
                    at = bisect_right(stages, stage) - 1
                    if at >= 0 and state.is_useless(maker, stages[at]):
                        gone[(maker, stages[at])] = None
        return done

    def _shift(self) -> list[Repeat]:
        state = self.state
        op_id, stage = self.draw.choice(self._placed)
        if state.together[op_id] or state.takers[op_id]:
            return []
        if self.draw.random() < 0.5:
            _, target = self.draw.choice(self._placed)
        else:
            target = stage + self.draw.randint(-3, 3)
        if target <= op_id or target >= state.graph.ops or target in state.stages[op_id]:
            return []
        done = [(op_id, stage), (op_id, target)]
        self.toggle(done)
        return done


def _both(first: list[Repeat], second: list[Repeat]) -> list[Repeat]:
    """Combines two moves; what both toggle is unchanged."""
    joined = dict.fromkeys(first)
    for repeat in second:
        if repeat in joined:
            del joined[repeat]
        else:
            joined[repeat] = None
    return list(joined)
