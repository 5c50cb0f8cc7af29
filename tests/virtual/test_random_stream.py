"""A dry run draws the random numbers of a real one, so that its batches are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memprof.virtual.values import random_stream
from memprof.virtual.values.random_stream import RandomStream
from tests.recorder.recorded import record_script

_aten = torch.ops.aten
_LENGTHS = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.utils.data.TensorDataset(torch.arange(1, 65))
for step, (lengths,) in enumerate(torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)):
    longest = int(lengths.max()) + int(torch.randint(0, 64, ()))
    model(torch.randn(8, longest, 32)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_batches_are_those_of_a_real_run(tmp_path: Path, seed: int) -> None:
    """Lengths, and the order of samples, are drawn after weights and dropout, from the same generator."""
    script = f"import torch\ntorch.manual_seed({seed})\n{_LENGTHS}"
    real = record_script(tmp_path, script, "--skip", "1", "--steps", "4", name="real.memprof")
    dry = record_script(tmp_path, script, "--dry-run", "--skip", "1", "--steps", "4", name="dry.memprof")
    peaks = real.trace.step_peaks()
    assert dry.trace.step_peaks() == peaks
    assert len(set(peaks.values())) > 1


@pytest.mark.parametrize("size", [5, 100, 2**20, 2**21 + 3, 3 * 2**20 + 64])
@pytest.mark.parametrize(("func", "settings"), [(_aten.normal_.default, (0.0, 0.02)), (_aten.uniform_.default, ())])
def test_large_tensors_are_drawn_in_parts(func: Any, settings: tuple[float, ...], size: int) -> None:
    """The generator is left as if they had been drawn at once."""
    torch.manual_seed(3)
    tensor = torch.empty(size)
    func(tensor, *settings)
    expected = torch.get_rng_state()
    torch.manual_seed(3)
    RandomStream().draw(func, (tensor, *settings), {}, tensor)
    assert torch.equal(torch.get_rng_state(), expected)


def test_no_more_is_drawn_than_a_dry_run_has_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor anything after a tensor that was too large, since the numbers would be others; a few are drawn even then."""
    monkeypatch.setattr(random_stream, "_MOST_DRAWN", 2 * random_stream.MOST_KEPT)
    stream = RandomStream()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for size in (2 * random_stream.MOST_KEPT + 1, random_stream.MOST_KEPT + 1):
        tensor = torch.empty(size)
        assert stream.draw(_aten.normal_.default, (tensor,), {}, tensor) is None
    assert torch.equal(torch.get_rng_state(), before)
    few = torch.empty(8)
    assert stream.draw(_aten.normal_.default, (few,), {}, few) is not None
