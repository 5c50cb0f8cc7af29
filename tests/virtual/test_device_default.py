"""Tensors that torch fills without an operator, on the default device of a dry run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recorder.recorded import record_script

JOB = """
import numpy as np
import torch
{around}
    made = [
        torch.tensor([1.0]),
        torch.as_tensor([1, 2], dtype=int),
        torch.as_tensor(np.ones(3)),
        torch.as_tensor(torch.ones(3, device="cpu")),
        torch.asarray([1.0]),
        torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2)),
        torch.as_tensor(np.ones(3), device="cpu"),
    ]
    print(*(tensor.device.type for tensor in made))
    assert torch.cuda.get_rng_state().device.type == "cpu"
    model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("around", ['torch.set_default_device("cuda")\nif True:', 'with torch.device("cuda"):'])
def test_tensors_of_given_values_are_made_on_the_default_device(tmp_path: Path, around: str) -> None:
    """Torch moves them there without an operator: the device is known below all function modes only."""
    ended = record_script(tmp_path, JOB.format(around=around), "--dry-run", "--device", "rtx4090")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == " ".join(["cuda"] * 6 + ["cpu"])
    assert ended.step.number >= 1
