"""Unmodified scripts that copy and save their model, trained under a plan from the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from memprof.policies.swap.policy import Swap
from memprof.trace.store import Trace

SNAPSHOTS = """
import torch
torch.manual_seed(0)
class Language(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.encoder = torch.nn.Dropout(0.2), torch.nn.Embedding(50, 32)
        self.rnn, self.decoder = torch.nn.LSTM(32, 32), torch.nn.Linear(32, 50)
    def forward(self, x, hidden):
        out, hidden = self.rnn(self.drop(self.encoder(x)), hidden)
        return torch.log_softmax(self.decoder(out).view(-1, 50), dim=1), hidden
text, criterion = torch.randint(50, (29, 8)), torch.nn.NLLLoss()
model = Language()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
def start():
    return torch.zeros(1, 8, 32), torch.zeros(1, 8, 32)
def evaluate(model):
    model.eval()
    with torch.no_grad():
        return criterion(model(text[:-1], start())[0], text[1:].view(-1)).item()
best = None
for epoch in range(2):
    model.train()
    hidden = start()
    for first in range(0, 28, 7):
        optimizer.zero_grad()
        output, hidden = model(text[first:first + 7], tuple(each.detach() for each in hidden))
        criterion(output, text[first + 1:first + 8].reshape(-1)).backward()
        optimizer.step()
    loss = evaluate(model)
    print(epoch, loss)
    if best is None or loss < best:
        torch.save(model, "model.pt")
        best = loss
again = torch.load("model.pt", weights_only=False)
print(best == evaluate(again), "forward" in vars(again))
"""

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
        ("--checkpoint", "rnn,decoder"),
        pytest.param(("--swap", ".:disk"), marks=pytest.mark.slow),
        pytest.param(("--swap", "parameters:disk"), marks=pytest.mark.slow),
        pytest.param(("--swap", "optimizer:disk", "--optimizer", "in-backward"), marks=pytest.mark.slow),
        pytest.param(("--remat", "1GiB"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_a_model_saved_after_each_epoch(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """torch.save(model) under a plan saves what is the job's own model, and the job prints what it prints plain."""
    plain, _ = run(tmp_path, SNAPSHOTS)
    assert plain.endswith("True False\n")
    if flags[1] in ("parameters:disk", "optimizer:disk"):
        what = flags[1].partition(":")[0]
        swap = Swap(modules=("**",), what=what, to="disk", minimum_bytes=1)  # no flag says how small
        write_plan(tmp_path / "plan.toml", Plan((swap,)))
        flags = ("--plan", "plan.toml", *flags[2:])
    planned, _ = run(tmp_path, SNAPSHOTS, *flags)
    assert planned == plain


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
