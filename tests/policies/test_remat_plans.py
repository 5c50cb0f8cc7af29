"""Steps that repeat follow a plan, those that differ do not, and the numbers and the cap are the same in both."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from memprof.errors import PolicyError
from memprof.policies.evict.outline import Outline
from memprof.policies.evict.planned import planned_course
from memprof.policies.evict.simulation import Rule, Simulation
from memprof.policies.evict.victims import Victims
from memprof.policies.remat import apply as runtime
from memprof.policies.remat.policy import Remat
from memprof.policies.runtime.job import Job
from tests.policies.test_remat import (
    BATCH,
    WIDTH,
    Dropouts,
    InPlace,
    Norms,
    budget,
    run,
    same,
    table,
    tensors,
)

__all__ = ["table"]  # a fixture that is used by all tests here
#: The step whose batch is larger than that of the others.
OTHER = 6


def loss_of(model, step):
    return model(tensors(step, BATCH + (32 if step == OTHER else 0), WIDTH)).square().mean()


@pytest.fixture
def choices(monkeypatch):
    """The step in which each victim was chosen by the rule."""
    chosen, choose = [], Victims.choose
    monkeypatch.setattr(Victims, "choose", lambda self, clock_us: chosen.append(len(steps)) or choose(self, clock_us))
    steps: list[int] = []
    return chosen, steps


@pytest.mark.parametrize("make", [Dropouts, Norms, InPlace])
def test_repeated_steps_follow_a_plan_and_a_different_one_does_not(make, choices):
    """From the third equal step on nothing is chosen, and in a step of another shape, victims are chosen again."""
    chosen, steps = choices

    def counted(model, step):
        steps.append(step)
        return loss_of(model, step)

    plain = run(make, loss_of, None, steps=9)
    policy = budget(plain, 0.75)
    steps.clear()
    within = run(make, counted, policy, steps=9)
    assert same(plain, within)
    assert within.peak_bytes <= plain.peak_bytes * 0.75
    assert within.dropped > 0
    planned = {number - 1 for number in chosen} & {3, 4, 5, 8}
    assert not planned
    assert OTHER in {number - 1 for number in chosen}


def test_a_budget_in_per_cent_is_a_share_of_the_first_steps_peak():
    """No cap applies before the optimizer state exists; after that, it is the given share of the measured peak."""
    torch.manual_seed(0)
    model = Dropouts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = Job(model, [optimizer])
    Remat(budget="80%").apply(job)
    memory = runtime._runtime.memory
    budgets, highest = [], 0
    ran = type(memory.peak).ran

    def following(self, need):
        nonlocal highest
        ran(self, need)
        highest = max(highest, self._before_bytes + need.highest_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(memory.peak), "ran", following)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            budgets.append(memory.budget_bytes)
    dropped = memory.dropped
    job.undo()
    assert budgets == [0, *[int(highest * 0.8)] * 4]
    assert dropped > 0


@pytest.mark.parametrize("text", ["0%", "101%", "x%", "%", "nan%"])
def test_a_share_is_between_0_and_100(text):
    """The sentence shows how a share is written."""
    with pytest.raises(PolicyError, match="write budget = '60%'"):
        Remat(budget=text)


def chain(length: int, size: int = 100) -> Outline:
    """Storages computed one from the other and read in reverse order, each of ``size`` bytes and 10 us."""
    total = 2 * length
    return Outline(
        size_bytes=[size] * length,
        may_go=[True] * length,
        can_recompute=[True] * length,
        created=list(range(length)),
        freed=[total - 1 - number for number in range(length)],
        free_from={number: number + 2 for number in range(length)},
        makers={number: [number] for number in range(length)},
        sources={number: [number - 1] if number else [] for number in range(length)},
        cost_us=[10.0] * total,
        workspace_bytes=[0] * total,
        floor_bytes=[0] * total,
        floor_after_bytes=[0] * total,
        reads=[[] for _ in range(length)] + [[length - 1 - number] for number in range(length)],
        what=["op"] * total,
    )


@pytest.mark.parametrize("room", [4, 6, 9, 15])
def test_a_plan_recomputes_no_more_than_the_rule(room):
    """Whatever the budget, planning with knowledge of the step is at least as good, and within the same bytes."""
    outline = chain(16)
    ruled = Simulation(outline, room * 100, Rule("eq-class")).run()
    planned = planned_course(outline, room * 100, "eq-class", frozenset())
    assert 0 < planned.again_us <= ruled.again_us


def test_a_course_ends_where_it_recomputes_too_much():
    """With room for three storages of a long chain, each read computes all before it again."""
    whole = Simulation(chain(64), 300, Rule("eq-class")).run().again_us
    assert whole > 1_000.0
    assert Simulation(chain(64), 300, Rule("eq-class"), most_again_us=whole).run().again_us == whole
    with pytest.raises(PolicyError, match=r"over and over within 300 B: more than 0\.8 times its work"):
        Simulation(chain(64), 300, Rule("eq-class"), most_again_us=1_000.0).run()


def test_planning_keeps_nothing_of_its_callers_alive():
    """An error that is kept holds the frames of the job that called, and their tensors, until garbage is collected."""

    def step():
        batch = torch.zeros(1)
        planned_course(chain(16), 400, "eq-class", frozenset())
        return weakref.ref(batch)

    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()


def test_nothing_is_evicted_where_all_fits_and_too_little_is_refused():
    """Sixteen of 100 bytes fit in 1,600; one and its source do not fit in 150."""
    assert planned_course(chain(16), 1600, "eq-class", frozenset()).dropped == []
    with pytest.raises(PolicyError, match="cannot stay within"):
        planned_course(chain(16), 150, "eq-class", frozenset())


def test_a_saved_tensor_that_the_job_reads_from_the_graph_is_left_to_it():
    """What ``grad_fn._saved_result1`` returns keeps its values, although all that may be evicted is."""
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH))
    job = Job(layer)
    Remat(budget="8GiB").apply(job)
    memory = runtime._runtime.memory
    out = layer(tensors(0, BATCH, WIDTH))
    read = out.grad_fn._saved_result1  # the mean of each row, which needs no gradient
    values = read.clone()
    other = out.square().sum()
    while (victim := memory.next_victim()) is not None:
        memory.drop(victim)
    assert read.shape == values.shape
    assert torch.equal(read, values)
    other.backward()
    assert memory.dropped > 0
    job.undo()
