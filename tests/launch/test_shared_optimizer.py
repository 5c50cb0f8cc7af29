"""One optimizer that updates two models, each called by itself: a plan changes it once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch.test_plan_record import memprof

ENCODER_AND_DECODER = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
decoder = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
for (batch,) in DataLoader(TensorDataset(torch.randn(128, 64)), batch_size=16):
    optimizer.zero_grad()
    loss = (decoder(encoder(batch)) - batch).pow(2).mean()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f}\\n", end="", flush=True)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(ENCODER_AND_DECODER)


def measured(*flags: str) -> tuple[str, int, int]:
    """Returns what the job prints under a plan, the peak predicted for it, and the one measured."""
    predicted = memprof("predict", "run.memprof", *flags, "--write", "plan.toml", "-f")
    assert predicted.returncode == 0, predicted.stderr
    ended = memprof("record", "-q", "-f", "-o", "head.memprof", "--plan", "plan.toml", "train.py")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(memprof("verify", "plan.toml", "head.memprof", "--json").stdout)
    return ended.stdout, found["predicted"]["peak_allocated_bytes"], found["measured"]["peak_allocated_bytes"]


def test_it_is_changed_once() -> None:
    """Each parameter is updated once in backward with its state moved in once, and the losses stay the same."""
    plain = memprof("record", "-q", "-o", "run.memprof", "train.py").stdout
    moved = ("--swap", "optimizer:disk", "--swap", "parameters:disk", "--optimizer", "in-backward")
    printed, predicted, peak = measured(*moved)
    assert printed == plain
    assert peak < predicted


def test_batches_are_divided_once() -> None:
    """Each of two ranks has every second batch, and half of the optimizer state (ZeRO-1)."""
    plain = memprof("record", "-q", "-o", "run.memprof", "train.py").stdout
    printed, predicted, peak = measured("--shard", "zero1", "--world-size", "2")
    assert len(printed.split()) == len(plain.split()) == 8
    assert peak == pytest.approx(predicted, abs=64)  # what gloo's threads hold
