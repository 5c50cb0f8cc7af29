"""Backward of `gather` and of indexing fills zeros in place, though a mode makes torch return a new tensor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recorder.recorded import record_script

_JOB = """
import torch
torch.manual_seed(0)
layer = torch.nn.Linear(64, 5000)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(STEPS):
    scores = layer(torch.randn(64, 64))
    places = torch.randint(64, (64,))
    loss = CHOSEN.square().sum() + scores.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "chosen", ["scores.gather(-1, places[:, None])", "scores[places[:8]]"], ids=["gather", "index"]
)
def test_peak_is_that_of_the_unrecorded_run(chosen: str, tmp_path: Path) -> None:
    """With a timed step that shows it, without one since the job ends before, and in a dry run."""
    peaks = {}
    for name, steps, flags in (("timed", 8, ()), ("short", 4, ()), ("dry", 4, ("--dry-run",))):
        folder = tmp_path / name
        folder.mkdir()
        ended = record_script(folder, _JOB.replace("CHOSEN", chosen).replace("STEPS", str(steps)), *flags)
        assert ended.returncode == 0, ended.stderr
        peaks[name] = int(ended.trace.step(2).memory.allocated_bytes.max())
    assert len(set(peaks.values())) == 1, peaks
