"""Averages of weights, going back to earlier weights, and several models in turn, under a plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import memprof
from memprof.policies.plan.plan import Plan
from tests.policies.loops import CHANGES, Loop, Net, each_change, policy_of

#: Those that leave every number as it is, to the bit.
EXACT = tuple(flag for flag in CHANGES if flag.startswith(("checkpoint", "swap", "remat", "optimizer=in-backward")))


@each_change
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("how", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}], ids=["swa", "ema"])
def test_averaged_model(loop: Any, how: dict[str, Any], is_late: bool) -> None:
    """torch's AveragedModel, made before the first step or after, averages the weights that the model had."""
    one = loop(applied=False)
    averaged = None if is_late else AveragedModel(one.model, **how)
    one.apply()
    if is_late:
        one.train()
        averaged = AveragedModel(one.model, **how)
    assert averaged is not None
    history = []
    for _ in range(3):
        one.train()
        averaged.update_parameters(one.model)
        history.append(one.model.state_dict()["head.weight"].float().clone())
    wanted = history[0]
    for number, weights in enumerate(history[1:], start=1):
        wanted = torch.lerp(wanted, weights, 0.5 if how else 1 / (number + 1))
    assert torch.allclose(averaged.module.head.weight.float(), wanted, atol=1e-6)
    update_bn([one.x], averaged)
    assert torch.isfinite(averaged(one.x)).all()


@each_change
def test_average_over_parameters(loop: Any) -> None:
    """A loop over parameters() after the update reads the weights, wherever the plan keeps them."""
    one = loop(applied=False)
    averages = copy.deepcopy(one.model)
    one.apply()
    one.train(batches=2)
    with torch.no_grad():
        for average, parameter in zip(averages.parameters(), one.model.parameters(), strict=True):
            average.copy_(parameter)
    for (name, average), value in zip(averages.named_parameters(), one.plain().parameters(), strict=True):
        assert torch.equal(average, value), name


@each_change
def test_going_back(loop: Any) -> None:
    """State loaded into the model and the optimizer takes effect: the step after it ends where it ended before."""
    one = loop()
    one.train()
    model, optimizer = copy.deepcopy(one.model.state_dict()), copy.deepcopy(one.optimizer.state_dict())
    one.train()
    wanted = copy.deepcopy(one.model.state_dict())
    one.train()
    one.model.load_state_dict(model)
    one.optimizer.load_state_dict(optimizer)
    one.train()
    for key, value in one.model.state_dict().items():
        assert torch.equal(value, wanted[key]), key


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


def test_weights_of_the_jobs_own_in_short_precision() -> None:
    """functional_call with float32 weights computes with them, where the model's own are in bfloat16."""
    model, x = torch.nn.Linear(16, 4), torch.ones(2, 16)
    job = memprof.apply(Plan((policy_of("precision=pure-bf16"),)), model, torch.optim.SGD(model.parameters(), lr=0.1))
    weights = {name: torch.full(value.shape, 1.001) for name, value in model.named_parameters()}
    result = torch.func.functional_call(model, weights, (x,))
    job.undo()
    assert torch.equal(result, torch.func.functional_call(model, weights, (x,)))


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
