"""State and parameters that are swapped, updated one by one inside backward."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import memprof
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan import Plan
from memprof.policies.runtime.job import Job
from memprof.policies.swap.policy import Swap
from memprof.replay.live import live_bytes_by_category
from memprof.trace.store import Trace
from tests.policies.faces import train

STATE = Swap(what="optimizer", to="disk", minimum_bytes=1 << 10)
PARAMETERS = Swap(modules=("**",), what="parameters", to="disk", minimum_bytes=1 << 10)
IN_BACKWARD = OptimizerPolicy(in_backward=True)
PLANS = {
    "state": Plan((STATE, IN_BACKWARD)),
    "parameters": Plan((PARAMETERS, IN_BACKWARD)),
    "both": Plan((STATE, PARAMETERS, IN_BACKWARD)),
}


@pytest.mark.parametrize("swapped", PLANS)
@pytest.mark.parametrize("job", ["gpt", pytest.param("resnet", marks=pytest.mark.slow)])
def test_numbers_stay_as_in_backward_alone_leaves_them(job: str, swapped: str) -> None:
    """What is swapped comes in for the update of its own parameter, and every weight is the same to the bit."""
    plain, planned = train(job, Plan((IN_BACKWARD,)), steps=4), train(job, PLANS[swapped], steps=4)
    assert planned.losses == plain.losses
    for key, value in plain.state.items():
        assert torch.equal(planned.state[key], value), key


def test_state_of_experts_without_tokens_stays_out(tmp_path: Path) -> None:
    """A step that updates one expert of four brings in the state of that one alone: its two averages for a weight."""
    gc.collect()
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    experts = torch.nn.ModuleList(layers)
    optimizer = torch.optim.AdamW(experts.parameters(), lr=0.1, foreach=False)
    job = memprof.apply(PLANS["state"], experts, optimizer)
    with memprof.record(tmp_path / "run.memprof", skip=4, steps=1):
        for number in range(6):
            optimizer.zero_grad()
            layers[number % 4](torch.ones(4, 64)).square().sum().backward()
            optimizer.step()
    job.undo()
    step = Trace.open(tmp_path / "run.memprof").steady_step()
    small = 4 * 2 * 64 * 4 + 8 * 4  # averages of the biases, which stay, and counts of steps
    assert live_bytes_by_category(step)["optimizer_state"].max() <= 2 * 64 * 64 * 4 + small


def test_a_parameter_without_a_hook_is_updated_in_step() -> None:
    """One that is thawed after the plan was applied is updated by step, with its state and its values there."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    job = Job(model, [optimizer])
    PLANS["both"].apply(job)
    before = model[0].weight.detach().clone()
    for step in range(4):
        if step == 2:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        model(torch.ones(4, 64)).square().sum().backward()
        optimizer.step()
    state = optimizer.state_dict()["state"]
    assert [float(state[number]["step"]) for number in range(4)] == [2.0, 2.0, 4.0, 4.0]
    job.undo()
    assert not torch.equal(model[0].weight, before)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
