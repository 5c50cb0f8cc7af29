"""The eviction rule that the planner dtr, remat's prediction and its runtime share."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from memprof.policies.evict.victims import HEURISTICS, Classes, Facts, Victims


@dataclass
class Chain:
    """Values computed one from the other, each of 100 bytes in as many microseconds as its number."""

    gone: set[int] = field(default_factory=set)
    locked: set[int] = field(default_factory=set)
    used: dict[int, float] = field(default_factory=dict)
    length: int = 200

    def victims(self, heuristic: str) -> Victims[int]:
        facts = Facts(
            own_us=float,
            sources=lambda value: range(max(value - 1, 0), value),
            dependants=lambda value: range(value + 1, min(value + 2, self.length)),
            is_gone=self.gone.__contains__,
            may_go=lambda value: value not in self.locked,
            size_bytes=lambda value: 100,
            used_us=lambda value: self.used.get(value, 0.0),
        )
        return Victims(facts, heuristic)


def test_the_least_h_goes_first_and_stale_values_before_fresh_ones():
    """Of equal staleness the cheapest goes; twice the staleness outweighs less than twice the cost."""
    chain = Chain()
    for heuristic in HEURISTICS:
        victims = chain.victims(heuristic)
        for value in (50, 30, 40):
            victims.add(value)
        assert victims.choose(1000.0) == 30
    chain.used = {30: 500.0, 40: 500.0}
    assert victims.choose(1000.0) == 50
    assert HEURISTICS["msps"].h(30.0, 100.0, 1000.0) == HEURISTICS["msps"].h(30.0, 100.0, 500.0)


def test_what_is_locked_or_removed_stays():
    """Removing any candidate leaves the others; none is chosen where none may go."""
    chain = Chain()
    victims = chain.victims("local")
    for value in (1, 2, 3, 4):
        victims.add(value)
        victims.add(value)
    victims.remove(1)
    victims.remove(1)
    chain.locked = {2}
    assert victims.choose(10.0) == 3
    victims.remove(4)
    victims.remove(3)
    assert victims.choose(10.0) is None
    chain.locked.clear()
    assert victims.choose(10.0) == 2


def test_values_that_the_job_freed_lead_to_classes():
    """Beside 10, value 11 was freed by the job and 12 and 13 were evicted: all three count, and 14 after 12 is back."""
    chain = Chain(gone={11, 12, 13})
    victims = chain.victims("eq-class")
    victims.evicted(12)
    victims.evicted(13)
    assert victims.cost_us(10) == 10 + 11 + (12 + 13)
    chain.gone.remove(12)
    victims.remade(12)
    assert victims.cost_us(12) == 12 + 11 + 13
    victims.forget_classes()
    chain.gone = {11}
    assert victims.cost_us(10) == 10 + 11


def test_few_gone_values_are_visited_for_each_candidate():
    """In a chain of 150 gone values, 24 count: the job waits for the choice."""
    victims = Chain(gone=set(range(150))).victims("msps")
    assert victims.cost_us(150) == pytest.approx(150 + sum(range(126, 150)))


def test_joined_classes_sum_and_members_leave():
    """A member takes what it brought, however its class was joined; a new member may come back."""
    classes = Classes()
    first, second, third = classes.add(1.0), classes.add(2.0), classes.add(4.0)
    classes.join(first, second)
    classes.join(third, second)
    classes.join(first, third)
    assert classes.of(first) == classes.of(second) == classes.of(third)
    assert classes.total(classes.of(second)) == 7.0
    classes.leave(second)
    assert classes.total(classes.of(first)) == 5.0
    classes.clear()
    assert classes.add(3.0) == 0
