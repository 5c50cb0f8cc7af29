"""Plans for a model that trains through a larger frozen one, as with perceptual losses."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tests.launch.test_plan_record import memprof

#: The frozen network is in evaluation mode; the moving average has names of the trained model, and saves nothing.
_JOB = """
import copy
import torch
from torch import nn

class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(64, 64), nn.Tanh())])
    def forward(self, x, y):
        return (self.features(x) - self.features(y)).square().mean()

class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 64))
    def forward(self, x):
        return self.inner(x)

torch.manual_seed(0)
model, critic = Coder(), Critic().eval().requires_grad_(False)
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(8):
    x = torch.randn(512, 64)
    target = average(x)
    loss = critic(model(x), x + 0.1 * target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f}\\n", end="", flush=True)
"""


def _applied(*policy: str) -> tuple[str, int, int]:
    """Predicts a policy for the recorded job and applies it; returns what the job prints, and both peaks in bytes."""
    predicted = memprof("predict", "run.memprof", *policy, "--write", "plan.toml")
    assert predicted.returncode == 0, predicted.stderr
    ended = memprof("record", "-q", "-o", "head.memprof", "--plan", "plan.toml", "train.py")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(memprof("verify", "plan.toml", "head.memprof", "--json").stdout)
    return ended.stdout, found["measured"]["peak_allocated_bytes"], found["predicted"]["peak_allocated_bytes"]


@pytest.mark.parametrize(
    "policy", [("--checkpoint", "features"), ("--swap", "features:disk"), ("--swap", "inner:disk")]
)
def test_a_plan_reaches_a_frozen_network_that_gradients_run_through(
    policy: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though another model is called first, and the plan was refused, as one for the larger of the two."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(_JOB)
    plain = memprof("record", "-q", "-o", "run.memprof", "train.py").stdout
    printed, measured, predicted = _applied(*policy)
    assert 'model = "Coder"' in Path("plan.toml").read_text()
    assert printed == plain
    assert measured == predicted
    recorded = tomllib.loads(Path("plan.toml").read_text())["prediction"]["recorded_peak_bytes"]
    assert measured < recorded or policy[1] == "inner:disk"


def test_a_frozen_network_inside_the_trained_model_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A LightningModule holds both, and calls each by itself; wildcards that match both mean the trained one."""
    monkeypatch.chdir(tmp_path)
    whole = """class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.critic = Coder(), Critic().eval().requires_grad_(False)

torch.manual_seed(0)
whole = Whole()
model, critic = whole.net, whole.critic
"""
    made = "torch.manual_seed(0)\nmodel, critic = Coder(), Critic().eval().requires_grad_(False)\n"
    assert made in _JOB
    Path("train.py").write_text(_JOB.replace(made, whole))
    memprof("record", "-q", "-o", "run.memprof", "train.py")
    _, measured, predicted = _applied("--checkpoint", "critic.features")
    assert measured == predicted


_EXTRACTED = """
import torch
from torch import nn

class Extractor(nn.Sequential):
    pass

class Coder(nn.Sequential):
    pass

extractor = Extractor(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))).requires_grad_(False)
data = extractor(torch.randn(512, 64))
del extractor
model = Coder(nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(64, 64), nn.Tanh())]))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(8):
    loss = model(data).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_frozen_network_that_makes_data_first_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has names of the trained model, which does not exist yet: the plan was refused as one for another model."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(_EXTRACTED)
    memprof("record", "-q", "-o", "run.memprof", "train.py")
    _, measured, predicted = _applied("--checkpoint", "0")
    assert measured == predicted
