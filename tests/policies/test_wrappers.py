"""Models inside DistributedDataParallel and torch.compile's module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import memprof
from memprof.errors import PolicyError
from memprof.launch.apply import find_mismatch, parameter_bytes
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.prediction import Prediction
from memprof.policies.runtime.job import Job
from memprof.policies.runtime.model_names import chosen_modules, unwrapped, without_wrappers
from memprof.policies.swap.policy import Swap
from memprof.trace.store import Trace


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.fixture
def distributed(tmp_path: Path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def prediction(kind: str, size: int) -> Prediction:
    return Prediction("run.memprof", kind, size, 2**20, 1e3, 2**19, "forward", "", 1e3, "replayed")


def swap(pattern: str) -> Swap:
    return Swap(modules=(pattern,), to="disk", minimum_bytes=1)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.ones(4, 32)).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("pattern", ["layers.0", "module.layers.0", "module.layers.*", ".", "module"])
def test_a_plan_for_either_fits_the_wrapped_and_the_bare_model(distributed: None, pattern: str) -> None:
    """Whatever the plan was written for: names are those of the model inside, with or without the wrapper's."""
    model = Net()
    wrapped = nn.parallel.DistributedDataParallel(model)
    plain = gradients(wrapped)
    size = parameter_bytes(model)
    for target in (wrapped, model):
        for kind in ("Net", "DistributedDataParallel"):
            job = memprof.apply(Plan((swap(pattern),), prediction(kind, size)), target)
            assert all(torch.equal(a, b) for a, b in zip(plain, gradients(target), strict=True))
            job.undo()
    with pytest.raises(PolicyError, match="no module of the model matches"):
        memprof.apply(Plan((swap("module.nowhere"),)), wrapped)


def test_another_model_is_still_refused(distributed: None) -> None:
    """A wrapper hides neither the type nor the size of what is inside."""
    model = Net()
    wrapped = nn.parallel.DistributedDataParallel(model)
    assert "this is Net" in find_mismatch(prediction("Other", parameter_bytes(model)), wrapped)
    assert "of parameters" in find_mismatch(prediction("DistributedDataParallel", 12), model)


def test_compiled_modules_are_looked_through() -> None:
    """Names of what torch.compile returns begin with _orig_mod."""
    model = Net()
    assert unwrapped(torch.compile(model)) is model
    assert [without_wrappers(name) for name in ("_orig_mod.layers.*", "module._orig_mod.a", "module", "modules.a")] == [
        "layers.*",
        "a",
        ".",
        "modules.a",
    ]


def test_saved_tensors_of_compiled_modules_are_left_alone() -> None:
    """Modules around and within a compiled one are refused, others are not; nothing is changed."""
    policy = Swap(("layers.0",), to="disk")
    with pytest.raises(PolicyError, match=r"the model runs code that torch"):
        policy.apply(Job(torch.compile(Net())))
    for compiled in ("", "layers", "layers.0"):
        model = Net()
        model.get_submodule(compiled).compile()
        with pytest.raises(PolicyError, match=f"{compiled or 'the model'} runs code"):
            policy.apply(Job(model))
        assert "forward" not in vars(model.layers[0])
    model = Net()
    model.layers[1].compile()
    job = Job(model)
    policy.apply(job)
    job.undo()


def test_a_recording_of_the_wrapped_model_knows_both_names(distributed: None, tmp_path: Path) -> None:
    """What a pattern chooses in the recording is what it chooses in the job."""
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memprof.record(tmp_path / "run.memprof", skip=1, steps=1):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 32)).sum().backward()
            optimizer.step()
    step = Trace.open(tmp_path / "run.memprof").steady_step()
    for pattern in ("layers.0", "module.layers.0"):
        assert step.modules.name[chosen_modules(step, (pattern,))].tolist() == ["module.layers.0"]
    assert step.modules.parent_id[chosen_modules(step, (".",))].tolist() == [-1]
