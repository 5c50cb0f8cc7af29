"""Models that the job drops under a plan: nothing that a plan installs in torch keeps them alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.compress.policy import Compress
from memprof.policies.loss.policy import ChunkedLoss
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan import Plan
from memprof.policies.precision.policy import Precision
from memprof.policies.remat import apply as remat
from memprof.policies.remat.policy import Remat
from memprof.policies.runtime.job import Job
from memprof.policies.swap.policy import Swap
from tests.policies.matrix.cells import single_plans, title_of
from tests.policies.matrix.world import World


@pytest.fixture(autouse=True)
def without_budget() -> Iterator[None]:
    """Ends remat's budget, which is the process's own and stays for other models."""
    yield
    if remat._runtime is not None:
        remat._leave()


@pytest.mark.parametrize("plan", single_plans(), ids=title_of)
def test_a_dropped_model_is_freed(plan: Plan) -> None:
    """Weights and state of an unreferenced model are freed by Python's collector, without undo."""
    world = World(lambda model, optimizers: plan.apply(Job(model, optimizers)))
    model, optimizer = world.ready()
    for inputs, targets in world.loader():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    state = [weakref.ref(each["momentum_buffer"]) for each in optimizer.state.values() if "momentum_buffer" in each]
    del model, optimizer, world
    gc.collect()
    assert not [each for each in weights + state if each() is not None]


class Heads(torch.nn.Module):
    """Two heads, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first = torch.nn.Linear(11, 11), torch.nn.Linear(11, 11)
        self.second = torch.nn.Sequential(torch.nn.Linear(11, 11), torch.nn.Softmax(dim=1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.first(hidden), self.second(hidden)


@pytest.mark.parametrize(
    "policy",
    [
        Swap(to="disk"),
        Swap(what="parameters", to="disk", minimum_bytes=1),
        Compress(("*",)),
        Remat("1GiB"),
        Checkpoint(("second",)),
        Precision("bf16"),
    ],
    ids=lambda policy: policy.describe(),
)
def test_an_output_that_no_backward_comes_to_is_freed(policy: Policy) -> None:
    """A node that saves its own output, and never runs, goes with the job's variables, as without a plan."""
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Job(model, [optimizer])
    policy.apply(job)
    alive = []
    for _ in range(4):
        optimizer.zero_grad()
        used, unused = model(torch.randn(37, 11))
        used.sum().backward()
        optimizer.step()
        del used, unused
        gc.collect()
        alive.append(sum(type(one) is torch.Tensor and one.shape == (37, 11) for one in gc.get_objects()))
    job.undo()
    assert alive[3] == alive[1]


@pytest.mark.parametrize(
    "policy",
    [Accumulate(2), ChunkedLoss(2), OptimizerPolicy(in_backward=True), Precision("fp16"), Precision("bf16", "bf16")],
    ids=lambda policy: policy.describe(),
)
def test_what_a_dropped_model_has_replaced_is_torchs_own_again(policy: Policy) -> None:
    """Once a model is gone, torch's functions are as they were before its plan."""

    def places() -> list[object]:
        optimizer, scaler = torch.optim.Optimizer, torch.amp.GradScaler
        functions = (torch.autograd.backward, torch.nn.functional.cross_entropy.__code__, torch.nn.Module.zero_grad)
        averages = torch.optim.swa_utils.AveragedModel.update_parameters
        methods = (averages, optimizer.add_param_group, optimizer.zero_grad, scaler.scale, scaler.step)
        return [*functions, *methods]

    gc.collect()
    before = places()
    made = World(lambda model, optimizers: Plan((policy,)).apply(Job(model, optimizers))).ready()
    assert any(one is not other for one, other in zip(places(), before, strict=True))
    del made
    gc.collect()
    assert all(one is other for one, other in zip(places(), before, strict=True))
