"""Updates and line searches of LBFGS, and adaptive steps, in dry runs, where no comparison of values ends them."""

from __future__ import annotations

from pathlib import Path

from tests.recorder.recorded import record_both, record_script

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


_HISTORY = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
optimizer = torch.optim.LBFGS(net.parameters(), **SETTINGS)
x, y = torch.randn(32, 64), torch.randn(32, 8)
evaluations = 0

def closure():
    global evaluations
    evaluations += 1
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    return loss

for _ in range(4):
    optimizer.step(closure)
    print("KEPT", len(optimizer.state[net[0].weight]["old_dirs"]), "AFTER", evaluations)
"""


def test_the_history_of_lbfgs_is_counted(tmp_path: Path) -> None:
    """Its updates make their largest number of iterations, and each adds two vectors up to the size of the history."""
    script = _HISTORY.replace("SETTINGS", "{'lr': 0.1, 'max_iter': 6, 'history_size': 10}")
    real, dry = record_both(tmp_path, script)
    assert real.stdout.splitlines()[1] == "KEPT 10 AFTER 12"
    assert dry.stdout.splitlines()[1] == "KEPT 10 AFTER 12"
    assert real.peak == dry.peak


def test_updates_of_lbfgs_end(tmp_path: Path) -> None:
    """Scripts that solve an equation give it thousands of iterations, and expect them to end by the loss."""
    script = _HISTORY.replace("SETTINGS", "{'max_iter': 50_000, 'history_size': 5, 'line_search_fn': 'strong_wolfe'}")
    dry = record_script(tmp_path, script, "--dry-run")
    assert "KEPT 5 AFTER 9" in dry.stdout
    assert dry.step.duration_us > 0


_ADAPTIVE = """
import torch
from torch import nn

net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
optimizer = torch.optim.Adam(net.parameters())

def solved(state):
    time, step = torch.tensor(0.0), torch.tensor(1.0)
    while time < 1:
        slope = net(state)
        tried = state + step * slope
        error = step * (net(tried) - slope) / 2
        ratio = (error / (10 + tried.abs())).pow(2).mean().sqrt()
        if ratio <= 1:
            time, state = time + step, tried
        if ratio > 1:
            step = step * 0.8 / ratio.detach().sqrt()
    return state

for _ in range(4):
    optimizer.zero_grad()
    solved(torch.randn(32, 16)).pow(2).mean().backward()
    optimizer.step()
"""


def test_adaptive_steps_are_accepted(tmp_path: Path) -> None:
    """A solver divides the error of a step by its tolerance, and tries again until that is at most 1."""
    real, dry = record_both(tmp_path, _ADAPTIVE)
    assert abs(real.peak - dry.peak) < real.peak / 1000
