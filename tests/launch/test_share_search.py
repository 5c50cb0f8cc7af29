"""The largest share that fits, and one answer to whether a job fits a card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.analysis.allocator.device_verdict import dry_fit
from memprof.cli.main import main
from memprof.launch.dry.dry_compiled import search_shares
from tests.recorder.recorded import record, record_script

_BUDGET = 1000


def tried(peak: Callable[[float], int], kept_bytes: int = 0) -> dict[float, int]:
    """Returns the peaks of the shares that the search tries, in order."""
    shares = search_shares(_BUDGET, kept_bytes)
    found: dict[float, int] = {}
    share = next(shares)
    while True:
        found[share] = peak(share)
        try:
            share = shares.send(found[share])
        except StopIteration:
            return found


def test_a_job_that_fits_is_run_once() -> None:
    """The whole is tried first."""
    assert tried(lambda share: 1000) == {1.0: 1000}


def test_an_even_fall_needs_one_more_run_where_what_is_kept_is_known() -> None:
    """The line meets the budget at a share of 0.64; with 970 bytes, that plan is kept."""
    assert tried(lambda share: round(400 + 900 * share), 900) == {1.0: 1300, 0.63: 967}


def test_an_unknown_fall_is_halved_first() -> None:
    """Then the line through the two nearest peaks is followed."""
    found = tried(lambda share: round(400 + 900 * share))
    assert list(found)[:2] == [1.0, 0.5]
    assert len(found) == 3
    assert max(peak for peak in found.values() if peak <= _BUDGET) >= 950


def test_zero_is_tried_last_where_nothing_fits() -> None:
    """In four runs, whatever was expected."""
    for kept in (0, 500, 5000):
        found = list(tried(lambda share: round(1500 + 100 * share), kept))
        assert found[-1] == 0.0
        assert len(found) <= 5


def test_shares_below_a_small_rise_are_tried() -> None:
    """A larger share had a slightly lower peak; the largest that fits is far below."""
    found = tried(lambda share: 1300 + round(10 * (1 - share)) if share > 0.3 else 900)
    assert min(found.values()) == 900


@given(st.lists(st.integers(1, 3000), min_size=11, max_size=11), st.integers(0, 4000), st.integers(1, 3000))
def test_a_peak_that_rises_and_falls_ends_the_search(peaks: list[int], kept: int, whole: int) -> None:
    """No share is tried twice; the last one that fits is near the budget, or just below one that does not fit."""
    found = tried(lambda share: whole if share == 1.0 else peaks[int(10 * share)], kept)
    shares = list(found)
    assert shares[0] == 1.0
    assert len(shares) <= 20
    fitting = [share for share in shares if found[share] <= _BUDGET]
    if not fitting:
        assert shares[-1] == 0.0
        return
    largest = max(fitting)
    above = [share for share in shares if share > largest]
    assert found[largest] >= 0.95 * _BUDGET or not above or min(above) - largest <= 0.11


@pytest.mark.parametrize("kept", [0, 700, 2000])
def test_the_largest_that_fits_is_found_in_few_runs_where_the_peak_falls(kept: int) -> None:
    """As fast as halving, or faster, for peaks that fall evenly, steeply at first, or steeply at last."""
    for power in (0.5, 1.0, 2.0):
        found = tried(lambda share, power=power: round(300 + 1200 * share**power), kept)  # type: ignore[misc]
        assert len(found) <= 5
        assert max(peak for peak in found.values() if peak <= _BUDGET) >= 850


#: Needs more than a T4 has only with the most that cuDNN may take.
_JOB = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64)
    def forward(self, x):
        return torch.relu(self.norm(self.conv(x))) + x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.head = nn.Linear(64, 10)
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))

net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(4):
    loss = net(torch.randn(90, 3, 128, 128, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_confirmed_plan_fits_by_the_verdict_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plans reserve too much for their tensors, which only a dry run shows: they are not kept."""
    monkeypatch.chdir(tmp_path)
    device = ("--dry-run", "--device", "t4")
    done = record_script(tmp_path, _JOB, *device)
    before = dry_fit(done.trace)
    assert before is not None
    assert before.describe().startswith("May not fit")
    words = ("--machine", "t4", "--forbid", "precision", "--check", "--write", "plan.toml")
    assert main(["suggest", str(done.trace.path), *words]) == 0
    under = record(tmp_path, *device, "--plan", "plan.toml", str(next(tmp_path.glob("*.py"))), name="under.memprof")
    after = dry_fit(under.trace)
    assert after is not None
    assert after.describe().startswith("Fits")
