"""Averages of weights, going back to earlier weights, and several models in turn, under a plan."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import memprof
from memprof.policies.plan.plan import Plan
from tests.policies.loops import CHANGES, Loop, Net, each_change, policy_of

#: Those that leave every number as it is, to the bit.
EXACT = tuple(flag for flag in CHANGES if flag.startswith(("checkpoint", "swap", "remat", "optimizer=in-backward")))


@pytest.mark.parametrize("flag", EXACT)
def test_the_best_copy_is_trained_on(flag: str) -> None:
    """A job that goes on with the best copy, under the plan, ends where the same job ends without a plan."""
    ends = []
    for plans in ((), (Plan((policy_of(flag),)),)):
        one = Loop(flag)
        jobs = [memprof.apply(plan, one.model, one.optimizer) for plan in plans]
        one.train(batches=2)
        best, state = copy.deepcopy(one.model), copy.deepcopy(one.optimizer.state_dict())
        one.train()
        optimizer = torch.optim.AdamW(best.parameters(), lr=0.01)
        optimizer.load_state_dict(state)
        jobs += [memprof.apply(plan, best, optimizer) for plan in plans]
        one.train(best, optimizer)
        one.train()
        for job in jobs:
            job.undo()
        ends.append([*best.state_dict().values(), *one.model.state_dict().values()])
    for mine, others in zip(*ends, strict=True):
        assert torch.equal(mine, others)


@each_change
def test_copies_trained_in_turn(flag: str) -> None:
    """A model and copies of it train in turn, each under the plan, as in federated averaging or cross-validation."""
    one = Loop(flag)
    models = [one.model]
    optimizers: list[torch.optim.Optimizer] = [one.optimizer]
    jobs = [one.apply()]
    for _ in range(2):
        models.append(copy.deepcopy(one.model))
        optimizers.append(torch.optim.AdamW(models[-1].parameters(), lr=0.01))
        jobs.append(memprof.apply(Plan((policy_of(flag),)), models[-1], optimizers[-1]))
        before = [model.state_dict()["head.weight"].clone() for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            one.train(model, optimizer)
        for model, value in zip(models, before, strict=True):
            assert not torch.equal(model.state_dict()["head.weight"], value)
            assert torch.isfinite(model.state_dict()["head.weight"]).all()
    for job in jobs:
        job.undo()
    assert [type(model) for model in models] == [Net] * 3
    one.train()


def test_gradients_are_clipped_without_what_is_out() -> None:
    """Clipping gradients, or setting them to zero, brings no swapped parameter in; reading parameters does."""
    one = Loop("swap=parameters:disk")
    job = one.apply()
    one.train()

    def out() -> int:
        return sum(type(each) is not torch.nn.Parameter for m in one.model.modules() for each in m._parameters.values())

    F.cross_entropy(one.model(one.x), one.y).backward()
    left = out()
    assert left > 0
    torch.nn.utils.clip_grad_norm_(one.model.parameters(), 1.0)
    one.model.zero_grad()
    assert out() == left
    assert not any(each.isnan().any() for each in one.model.parameters())
    job.undo()
