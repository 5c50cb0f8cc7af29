"""`memprof.apply` in the user's own code: changes, refusals, and what recordings contain."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import memprof
from memprof.errors import BadInputError, PolicyError
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from memprof.policies.plan.prediction import Prediction
from memprof.trace.store import Trace


class Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def prediction_for(model: str, parameter_bytes: int) -> Prediction:
    return Prediction("run.memprof", model, parameter_bytes, 10, 1.0, 5, "forward", "", 2.0, "replayed")


def train(model: nn.Module, steps: int = 6) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_plan_file_is_applied_and_taken_back(tmp_path: Path) -> None:
    """A plan from a file changes the model in place; `undo` gives it back as it was."""
    write_plan(tmp_path / "plan.toml", Plan((Checkpoint(modules=("layers.*",)),)))
    model = Net()
    job = memprof.apply(tmp_path / "plan.toml", model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert all("forward" in layer.__dict__ for layer in model.layers)
    job.undo()
    assert not any("forward" in layer.__dict__ for layer in model.layers)


def test_one_several_or_no_optimizer() -> None:
    """The optimizer may be left out, be one, or be a list."""

    @dataclass(frozen=True)
    class Counts(Checkpoint):
        seen: ClassVar[list[int]] = []

        def apply(self, job: Any) -> None:
            self.seen.append(len(job.optimizers))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = Counts(modules=("layers.*",))
    plan = Plan()
    object.__setattr__(plan, "policies", (policy,))
    for given in (None, optimizer, [optimizer, optimizer]):
        memprof.apply(plan, model, given)
    assert Counts.seen == [0, 1, 2]


@pytest.mark.parametrize(
    ("prediction", "sentence"),
    [
        (prediction_for("GPT", 2176), "made for another model: for GPT, and this is Net"),
        (prediction_for("Net", 2048), "for Net with 2.00 KiB of parameters, and this has 2.12 KiB"),
        (prediction_for("Net", 2175), "for Net with 2,175 B of parameters, and this has 2,176 B"),
    ],
)
def test_plan_of_another_model_is_refused(prediction: Prediction, sentence: str) -> None:
    """The model's type and the size of its parameters are held to what the plan was made for."""
    model = Net()
    with pytest.raises(PolicyError) as error:
        memprof.apply(Plan((Checkpoint(modules=("layers.*",)),), prediction), model)
    assert sentence in str(error.value)
    assert not any("forward" in layer.__dict__ for layer in model.layers)


def test_what_is_no_model_or_no_plan_is_refused(tmp_path: Path) -> None:
    """A sentence says what was expected; a missing file is bad input."""
    with pytest.raises(PolicyError, match=r"takes a torch\.nn\.Module, not a int"):
        memprof.apply(Plan(), 3)  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="does not exist"):
        memprof.apply(tmp_path / "plan.toml", Net())


def test_refusal_of_a_later_policy_takes_the_earlier_back() -> None:
    """All policies are applied or none."""
    model = Net()
    with pytest.raises(PolicyError, match="absent"):
        memprof.apply(Plan((Checkpoint(modules=("layers.0",)), Checkpoint(modules=("absent",)))), model)
    assert not any("forward" in layer.__dict__ for layer in model.layers)


def test_recording_in_code_says_under_which_plan(tmp_path: Path) -> None:
    """A trace made while a plan is in force carries it, with the notes of its policies; after `undo`, none does."""
    # Models of other tests whose plans are in force live on in reference cycles.
    gc.collect()
    model = Net()
    job = memprof.apply(Plan((Checkpoint(modules=("layers.*",)),)), model)
    with memprof.record(tmp_path / "under.memprof", skip=0, steps=2):
        train(model)
    job.undo()
    with memprof.record(tmp_path / "plain.memprof", skip=0, steps=2):
        train(model)
    manifest = Trace.open(tmp_path / "under.memprof").manifest
    assert manifest.plan == {"checkpoint": {"modules": ["layers.*"]}}
    assert set(job.notes) <= set(manifest.notes)
    assert Trace.open(tmp_path / "plain.memprof").manifest.plan is None
