"""Plans for copied models, for subclasses of tensors, and for a model trained through a frozen one."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from memprof.trace.store import Trace
from tests.launch.test_plan_record import memprof

IN_TURN = """
import copy, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
sets = [torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(4, (64,))) for _ in range(2)]
average, (inputs, labels) = copy.deepcopy(model), sets[0].tensors
for round in range(2):
    states = []
    for data in sets:
        local = copy.deepcopy(model)
        optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
        for x, y in torch.utils.data.DataLoader(data, batch_size=32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(local(x), y).backward()
            optimizer.step()
        states.append(local.state_dict())
    model.load_state_dict({key: (states[0][key].float() + states[1][key].float()) / 2 for key in states[0]})
    with torch.no_grad():
        for old, new in zip(average.parameters(), model.parameters()):
            old.mul_(0.5).add_(new, alpha=0.5)
        print(round, *[torch.nn.functional.cross_entropy(each(inputs), labels).item() for each in (model, average)])
"""


def run(folder: Path, script: str, *flags: str) -> tuple[str, str]:
    """Runs a script as it is, or under a plan; returns what it printed, and what memprof did."""
    (folder / "train.py").write_text(script)
    recorder = ["-m", "memprof", "record", "-f", "-o", "run.memprof", *flags] if flags else []
    done = subprocess.run(
        [sys.executable, *recorder, "train.py"], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ("--loss", "2", "--checkpoint", "0"),
        pytest.param(("--accumulate", "2"), marks=pytest.mark.slow),
        pytest.param(("--precision", "bf16"), marks=pytest.mark.slow),
        pytest.param(("--precision", "pure-bf16"), marks=pytest.mark.slow),
        pytest.param(("--optimizer", "in-backward"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_copies_trained_in_turn(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Each copy that is trained gets the plan, and the copies and their average learn what they learn without."""
    plain, _ = run(tmp_path, IN_TURN)
    planned, _ = run(tmp_path, IN_TURN, *flags)
    wanted = [float(word) for word in plain.split()]
    assert [float(word) for word in planned.split()] == pytest.approx(wanted, abs=0.01)
    notes = Trace.open(tmp_path / "run.memprof").manifest.notes
    assert len(notes) == len(set(notes))


_JOB = """
import torch
from torch import nn

class Tagged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(result, cls):
            result.tag = next((each.tag for each in args if hasattr(each, "tag")), None)
        return result

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x
    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        assert isinstance(x, Tagged) and x.tag == "scan", type(x)
        return 2 * gradient

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 64), nn.PReLU(), nn.Linear(64, 64), nn.PReLU())
        self.last = nn.Linear(64, 1)
    def forward(self, x):
        return self.last(self.first(Doubled.apply(x)))

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    x = torch.randn(512, 64).as_subclass(Tagged)
    x.tag = "scan"
    loss = model(x).as_subclass(torch.Tensor).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("modules", ["first", "."])
def test_activations_of_a_subclass_are_moved(modules: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stayed, which was 1 MiB for each PReLU of MONAI's U-Net; backward gets them in their type, with fields."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(_JOB)
    plain = memprof("record", "-q", "-o", "run.memprof", "train.py").stdout
    predicted = memprof("predict", "run.memprof", "--swap", f"{modules}:disk", "--write", "plan.toml")
    assert predicted.returncode == 0, predicted.stderr
    ended = memprof("record", "-q", "-o", "head.memprof", "--plan", "plan.toml", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == plain
    found = json.loads(memprof("verify", "plan.toml", "head.memprof", "--json").stdout)
    assert found["measured"]["peak_allocated_bytes"] == found["predicted"]["peak_allocated_bytes"]


_NESTED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
    def forward(self, x):
        rows = torch.nested.as_nested_tensor([x, x[:200]])
        return torch.nested.to_padded_tensor(self.last(self.first(rows).relu()), 0.0)

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    loss = model(torch.randn(512, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f}\\n", end="", flush=True)
"""


def test_nested_tensors_are_left_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch's strided layout have no sizes, so that swap ended the job."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(_NESTED)
    plain = memprof("record", "-q", "-o", "run.memprof", "train.py").stdout
    predicted = memprof("predict", "run.memprof", "--swap", ".:disk", "--write", "plan.toml")
    assert predicted.returncode == 0, predicted.stderr
    ended = memprof("record", "-q", "-o", "head.memprof", "--plan", "plan.toml", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == plain


def test_a_dry_run_moves_activations_of_a_subclass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors have a class that is the job's and a fake tensor's: they stayed, and its peak was higher."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(_JOB)
    memprof("record", "-q", "--dry-run", "-o", "run.memprof", "train.py")
    predicted = memprof("predict", "run.memprof", "--swap", "first:disk", "--write", "plan.toml")
    assert predicted.returncode == 0, predicted.stderr
    ended = memprof("record", "-q", "--dry-run", "-o", "head.memprof", "--plan", "plan.toml", "train.py")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(memprof("verify", "plan.toml", "head.memprof", "--json").stdout)
    assert found["measured"]["peak_allocated_bytes"] == found["predicted"]["peak_allocated_bytes"]


#: The frozen network is in evaluation mode; the moving average has names of the trained model, and saves nothing.
_LOSS_JOB = """
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
    Path("train.py").write_text(_LOSS_JOB)
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
    assert made in _LOSS_JOB
    Path("train.py").write_text(_LOSS_JOB.replace(made, whole))
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
