"""Recording a loop under accelerate."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from memprof.policies.plan.plan_file import read_plan
from memprof.trace.schema import Steps
from memprof.trace.store import Trace

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
from memprof.integrations.accelerate import record  # noqa: E402 - it imports accelerate


def train(path: Path | None, rounds: int = 2, **asked: Any) -> list[float]:
    """Trains for 20 batches, two of which make an update."""
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=rounds)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(20 * 256, 64), torch.randint(0, 4, (20 * 256,)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=256))
    losses = []
    if path is not None:
        recording = record(accelerator, path, **asked)
    for rows, labels in loader:
        with accelerator.accumulate(model):
            loss = functional.cross_entropy(model(rows), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    accelerator.end_training()
    if path is not None:
        assert not recording._session.is_active
        assert "end_training" not in accelerator.__dict__
    return losses


def test_micro_batches_are_one_step(tmp_path: Path) -> None:
    """A step is two micro-batches and one update; losses are the same to the bit; a plan for the budget is written."""
    gc.collect()
    losses = train(tmp_path / "run.memprof", budget="75%")
    gc.collect()
    assert losses == train(None)
    trace = Trace.open(tmp_path / "run.memprof")
    assert trace.recorded_steps == (2, 3, 4)
    steps = trace.table(Steps)
    recorded = steps.kind == "recorded"
    assert set(steps.micro_batches[recorded]) == {2}
    assert set(steps.optimizer_updates[recorded]) == {1}
    plan = read_plan(tmp_path / "plan.toml")
    assert plan.prediction is not None
    assert plan.prediction.peak_allocated_bytes <= 0.75 * plan.prediction.recorded_peak_bytes


def test_end_of_the_training_ends_the_recording(tmp_path: Path) -> None:
    """A training shorter than the window is recorded as far as it came."""
    gc.collect()
    train(tmp_path / "run.memprof", rounds=5, steps=30)
    steps = Trace.open(tmp_path / "run.memprof").table(Steps)
    assert list(steps.step[(steps.kind == "recorded") & steps.is_complete]) == [2, 3]


def test_with_statement_ends_it(tmp_path: Path) -> None:
    """An error inside a with statement goes on, and the recording ends there."""
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(8, 8)

    def fail() -> None:
        with record(accelerator, tmp_path / "run.memprof"):
            model(torch.ones(2, 8)).sum().backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not Trace.open(tmp_path / "run.memprof").manifest.capture.is_complete
