"""A note says where evaluation runs with gradients enabled, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.analysis.plans.predict import step_warnings
from memprof.trace.files.spool import GRADIENTS_ENABLED
from tests.recorder.recorded import record_script

_JOB = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def train(batch):
    loss = model(torch.randn(batch, 128)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
def evaluate():
    model.eval()
    total = 0
    for _ in range(2):
        total += model(torch.randn(2048, 128)).square().mean()
    model.train()
    return float(total)
{loop}
"""
_EACH_EPOCH = "for epoch in range(4):\n    train(32)\n    {evaluate}"
_AT_THE_END = "for step in range(8):\n    train(32)\n{evaluate}"
_FROZEN = "model.eval()\nfor step in range(8):\n    train(32 if step < 7 else 2048)\nmodel(torch.randn(4096, 128))"


@pytest.mark.parametrize(
    ("loop", "is_told"),
    [
        (_EACH_EPOCH.format(evaluate="evaluate()"), True),
        (_EACH_EPOCH.format(evaluate="torch.no_grad()(evaluate)()"), False),
        (_AT_THE_END.format(evaluate="evaluate()"), True),
        (_AT_THE_END.format(evaluate="torch.no_grad()(evaluate)()"), False),
        (_FROZEN, False),
    ],
    ids=["each epoch", "each epoch, no_grad", "at the end", "at the end, no_grad", "trained in evaluation mode"],
)
def test_evaluation_with_gradients_is_noted(tmp_path: Path, loop: str, is_told: bool) -> None:
    """With the bytes it has computed at its fullest, and among the warnings of predictions."""
    trace = record_script(tmp_path, _JOB.format(loop=loop)).trace
    notes = [note for note in trace.manifest.notes if note.startswith(GRADIENTS_ENABLED)]
    assert bool(notes) is is_told
    if is_told:
        assert "Run it under torch.no_grad()" in notes[0]
        assert notes[0] in step_warnings(trace, trace.fullest_step())
