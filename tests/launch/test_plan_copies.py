"""Unmodified scripts that copy and save their model, trained under a plan from the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memprof.trace.store import Trace

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
