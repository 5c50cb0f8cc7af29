"""The planner for repeated parts: Gruslys 2016."""

from __future__ import annotations

import math
from functools import cache

import pytest

from memprof.planners.base import ScheduleRequest
from memprof.planners.graph.graph import graph_of
from memprof.planners.published.bptt import Bptt, policy_for
from memprof.trace.step import Step
from tests.planners import graphs
from tests.planners.promises import check_answers, peak_bytes, step_named


def _recurrent(steps: int) -> Step:
    """Steps of two products, a sum and a nonlinearity, the last of which is the state that passes on."""
    inputs: list[list[int]] = [[]]
    sizes, times = [400], [1.0]
    for _ in range(steps):
        state = len(inputs) - 1
        inputs += [[state], [state], [state + 1, state + 2], [state + 3]]
        sizes += [1600, 1600, 1600, 400]
        times += [20.0, 20.0, 2.0, 4.0]
    return graphs.mirrored(inputs, sizes, times)


def _revolve(steps: int, slots: int) -> int:
    """Forward steps of the optimal binomial schedule, the last one before each backward step with them.

    Griewank & Walther 2000 (Algorithm 799: revolve), section 2: with r the least number of repetitions for which
    beta(s, r) = (s + r)! / (s! r!) is at least l, r l - beta(s + 1, r - 1) steps are gone over again at least.
    """
    repeats = next(r for r in range(steps + 1) if math.comb(slots + r, slots) >= steps)
    return steps + repeats * steps - (math.comb(slots + repeats, slots + 1) if repeats else 0)


@pytest.mark.parametrize(("steps", "slots"), [(1, 1), (2, 1), (5, 1), (5, 2), (10, 3), (40, 4), (60, 10), (60, 80)])
def test_hidden_states_alone_equal_revolve(steps: int, slots: int) -> None:
    """The table is that of the binomial schedules, which are optimal for equal steps."""
    table = policy_for(steps, slots)
    for t in range(1, steps + 1):
        for m in range(1, slots + 1):
            assert table.cost[t, m] == _revolve(t, m)


def test_one_slot_by_hand() -> None:
    """With one slot every step starts from the beginning: C(t, 1) = t (t + 1) / 2. And C(3, 2) = 5 by hand.

    Keep the input of the second step (1 forward), go to the third (1) and through it (1), through the second (1),
    and through the first (1).
    """
    table = policy_for(5, 2)
    assert table.cost[:, 1].tolist() == [0, 1, 3, 6, 10, 15]
    assert table.cost[3, 2] == 5


@pytest.mark.parametrize("alpha", [1, 2, 3])
def test_the_mixed_form_equals_its_recurrence(alpha: int) -> None:
    """Internal states too: the table equals the published recurrence, evaluated literally."""

    @cache
    def cost(t: int, m: int) -> float:
        if t == 0:
            return 0
        if m < 1:
            return math.inf
        tries: list[float] = [t * (t + 1) / 2] if m == 1 else [1.0] if t == 1 else []
        if m > 1:
            tries += [y + cost(t - y, m - 1) + cost(y, m) for y in range(1, t)]
        if m > alpha:
            tries += [y + cost(t - y, m - alpha) + cost(y - 1, m) for y in range(1, t + 1)]
        return min(tries)

    table = policy_for(14, 9, alpha)
    for t in range(1, 15):
        for m in range(1, 10):
            assert table.cost[t, m] == cost(t, m)


def test_the_papers_headline() -> None:
    """1000 steps with 5 % of the memory take about one third more time than keeping everything.

    Time in forward steps, a backward step being two of them; an internal state as large as a hidden one.
    """
    forwards = policy_for(1000, 50, 1).cost[1000, 50]
    more = (forwards + 2 * 1000) / (1000 + 2 * 1000) - 1
    assert 0.30 < more < 0.34


def test_every_answer_about_a_recurrent_network_is_true() -> None:
    """Never over budget, never slower with more, and what it says about the least budget holds."""
    check_answers(Bptt(), _recurrent(12), (1.0, 0.7, 0.4, 0.2))


@pytest.mark.parametrize("name", ["gpt", "recurrent", "chain"])
def test_it_finds_what_repeats(name: str) -> None:
    """Layers of a transformer, steps of a recurrent network and equal layers fit into half of the memory."""
    graph = graph_of(_recurrent(12) if name == "recurrent" else step_named(name))
    found = Bptt().search(ScheduleRequest(graph, peak_bytes(graph) // 2))
    assert found.status == "found"
    assert found.runs is not None


def test_where_nothing_repeats_it_says_so() -> None:
    """A chain of layers that all differ has no repeated part."""
    graph = graph_of(graphs.uneven_chain(8, seed=1))
    found = Bptt().search(ScheduleRequest(graph, peak_bytes(graph) - 1))
    assert found.status == "nothing found"
    assert found.reason == "No part of the step repeats."
