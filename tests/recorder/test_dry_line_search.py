"""Line searches of LBFGS in dry runs, where no comparison of values ends them."""

from __future__ import annotations

from pathlib import Path

from tests.recorder.recorded import record_script

_SEARCHED = """
import torch
from torch import nn

net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4, max_eval=100_000, line_search_fn="strong_wolfe")
x = torch.randn(32, 2, requires_grad=True)
calls = 0

def closure():
    global calls
    calls += 1
    optimizer.zero_grad()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    loss = slope.pow(2).mean() + net(x).pow(2).mean()
    loss.backward()
    return loss

for _ in range(4):
    optimizer.step(closure)
print("CALLS", calls)
"""


def test_a_line_search_ends(tmp_path: Path) -> None:
    """Its comparisons of values that were not computed would never be true, up to its limit of 100,000 evaluations."""
    ended = record_script(tmp_path, _SEARCHED, "--dry-run", "--skip", "1", "--steps", "2")
    assert [note for note in ended.trace.manifest.notes if "LBFGS' line searches" in note]
    assert ended.step.duration_us > 0


_ACCEPTED = """
import torch
from torch import nn

net = nn.Bilinear(100, 100, 10, bias=False)
nn.init.constant_(net.weight, 1e-5)
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=1, line_search_fn="strong_wolfe")
first, second = torch.randn(1, 100), torch.randn(1, 100)

def closure():
    optimizer.zero_grad()
    loss = net.weight.square().sum() / 2 + 0 * net(first, second).sum()
    loss.backward()
    return loss

for _ in range(3):
    optimizer.step(closure)
"""


def test_a_line_search_takes_as_much_memory_as_a_real_one(tmp_path: Path) -> None:
    """It holds a copy of the gradient while the loss is evaluated again; here a real search ends after one trial."""
    real, dry = (
        record_script(tmp_path, _ACCEPTED, *flags, "--skip", "0", "--steps", "1", name=f"{len(flags)}.memprof")
        for flags in ((), ("--dry-run",))
    )
    gradient_bytes = 4 * 100 * 100 * 10
    assert abs(real.peak - dry.peak) < gradient_bytes / 100
