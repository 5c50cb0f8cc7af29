"""Swap inside backward, beside the job's own checkpoints, and where forward differentiates."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import memprof
from memprof.policies.base import Policy
from memprof.policies.compress.policy import Compress
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from memprof.policies.runtime.job import Job
from memprof.policies.swap.policy import Swap
from memprof.replay.live import live_bytes, live_bytes_by_category
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.policies.faces import train
from tests.recorder.recorded import record, record_script

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


_JOB = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.act = nn.SiLU(inplace=True)
    def forward(self, x):
        return x + self.act(self.norm(self.conv(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        # The input of the blocks is changed in place by the last operator of the stem.
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.SiLU(inplace=True))
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(16, 10)
    def forward(self, x):
        x = checkpoint(self.blocks, self.stem(x), use_reentrant=False)
        return self.head(x.mean((2, 3)))

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.randn(8, 3, 32, 32)
for step in range(6):
    loss = model(rows).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("modules", [("stem",), ("stem.2",), ("blocks",), ("*",), (".",)])
def test_a_region_keeps_what_its_input_became(modules: tuple[str, ...], tmp_path: Path) -> None:
    """Hooks around a region see its input; those of a module that is run again see nothing, since it has its own."""
    plan = Plan((Swap(modules=modules, to="disk"),))
    step = record_script(tmp_path, _JOB).step
    predicted = int(live_bytes(plan.transform(step)).during.max())
    write_plan(tmp_path / "plan.toml", plan)
    under = record(tmp_path, "--plan", "plan.toml", "job.py", name="under.memprof")
    assert abs(predicted - under.peak) <= 16


_FORWARD = "x = checkpoint(self.blocks, self.stem(x), use_reentrant=False)"


_EACH = """x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant={})"""


@pytest.mark.parametrize(
    ("is_reentrant", "policy"),
    [
        (True, Swap(modules=("*",), to="disk")),
        (False, Compress(modules=(".",))),
        pytest.param(True, Compress(modules=(".",)), marks=pytest.mark.slow),
        pytest.param(True, Swap(modules=("blocks.1", "stem"), to="disk"), marks=pytest.mark.slow),
    ],
)
def test_inputs_of_regions_are_unpacked_and_what_reentrant_ones_save_is_packed(
    is_reentrant: bool, policy: Policy, tmp_path: Path
) -> None:
    """A region's second run reads what was unpacked; hooks of its modules pack what a reentrant one saves then."""
    step = record_script(tmp_path, _JOB.replace(_FORWARD, _EACH.format(is_reentrant))).step
    plan = Plan((policy,))
    predicted = int(live_bytes(plan.transform(step)).during.max())
    write_plan(tmp_path / "plan.toml", plan)
    under = record(tmp_path, "--plan", "plan.toml", "job.py", name="under.memprof")
    assert abs(predicted - under.peak) <= 16


class Residual(nn.Module):
    """Returns its input's image, and the sum of a power series in its Jacobian, as residual flows do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 2))

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch = batch.requires_grad_()
        image, total = self.layers(batch), torch.zeros(())
        vector = torch.ones_like(batch)
        for _ in range(4):
            (vector,) = torch.autograd.grad(image, batch, vector, create_graph=True)
            total = total + vector.sum()
        return batch + image, total


def _recorded(path: Path, policy: Swap | None) -> Step:
    torch.manual_seed(0)
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = Job(nn.ModuleDict({"block": model}), [optimizer])
    if policy is not None:
        policy.apply(job)
    with memprof.record(path, skip=1, steps=1):
        for _ in range(3):
            image, total = job.model["block"](torch.randn(200, 2))
            (image.square().mean() + total).backward()
            optimizer.step()
            optimizer.zero_grad()
    job.undo()
    return Trace.open(path).fullest_step()


def test_what_is_copied_back_in_forward_comes_back_with_its_neighbours(tmp_path: Path) -> None:
    """To the byte: its second record is needed first, and brings back what was packed by the node before it."""
    policy = Swap(modules=("block",), to="disk")
    predicted = policy.transform(_recorded(tmp_path / "plain.memprof", None))
    measured = _recorded(tmp_path / "swapped.memprof", policy)
    assert int(live_bytes(predicted).during.max()) == int(live_bytes(measured).during.max())
