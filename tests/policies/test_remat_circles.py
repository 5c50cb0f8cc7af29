"""Tensors that remat keeps: overwritten with values computed from them, or read by what is recomputed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import memprof
from memprof.errors import PolicyError
from memprof.policies.evict.outline import cannot_be_remade, units_of
from memprof.policies.precision.policy import Precision
from memprof.policies.remat.policy import Remat
from memprof.replay.live import live_bytes
from memprof.trace.store import Trace
from tests.recorder.recorded import record_script


class Solver(nn.Module):
    """Fills a table row by row, each from the rows before: a Runge-Kutta step."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slopes = x.new_zeros(4, *x.shape)
        for row in range(4):
            slopes[row] = self.field(x + slopes.sum(0))
        return x + slopes.mean(0)


def test_circles_are_found():
    """What is made from itself by way of others is lost, and what outlives the part of the circle it is made from."""
    sources = {1: [0], 2: [1, 4], 3: [2], 4: [3], 5: [4], 6: [4], 7: [6]}
    lives = np.array([9, 9, 4, 4, 4, 9, 3, 9])
    expected = [False, False, True, True, True, True, False, False]
    np.testing.assert_array_equal(cannot_be_remade(sources, lives), expected)
    assert not cannot_be_remade({}, lives).any()


@pytest.mark.timeout(120)
def test_a_table_filled_from_itself_is_predicted_in_time(tmp_path):
    """A step that fills a table from the table itself is predicted or refused, not followed in a circle for ever."""
    torch.manual_seed(0)
    model, head = Solver(), nn.Sequential(nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    with memprof.record(tmp_path / "run.memprof", skip=2, steps=1) as recorder:
        for _ in range(4):
            optimizer.zero_grad()
            head(model(model(torch.randn(256, 64)))).pow(2).mean().backward()
            optimizer.step()
            recorder.step()
    step = Trace.open(tmp_path / "run.memprof").steady_step()
    assert not units_of(step).may_go.all()
    peak = int(live_bytes(step).during.max())
    for share in (0.95, 0.8, 0.6):
        held, refused = None, ""
        try:
            held = int(live_bytes(Remat(budget=str(int(peak * share))).transform(step)).during.max())
        except PolicyError as error:
            refused = str(error)
        assert "remat cannot stay within" in refused if held is None else held <= peak * share


_MADE_IN_THE_LOOP = """
import torch
from torch import nn

model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def inputs():
    return torch.cat([torch.randn(2048, 32), torch.randn(2048, 32)], 1)

for step in range(6):
    model(inputs()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_inputs_are_held_for_what_is_computed_from_them(tmp_path: Path) -> None:
    """Under bf16 the float32 input is freed in forward, and its short copy can be recomputed while remat holds it."""
    step = Precision("bf16").transform(record_script(tmp_path, _MADE_IN_THE_LOOP).step)
    peak = int(live_bytes(step).during.max())
    under = Remat(budget=str(peak * 3 // 4), exceeds=True).transform(step)
    under.check()
    assert int(live_bytes(under).during.max()) <= peak * 3 // 4
