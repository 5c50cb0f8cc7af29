"""`memprof.make_fit` in training loops of this process: it plans, applies and compares while they train."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import memprof
from memprof.errors import PolicyError, UsageError
from memprof.launch.live.live_fit import LiveFit
from memprof.launch.live.make_fit import live_policies
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan, plan_for
from memprof.policies.registry import policy_types

STEPS = 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.dropout = nn.Linear(64, 256), nn.Linear(256, 64), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.narrow(torch.relu(self.wide(x))))


class Net(nn.Module):
    def __init__(self, blocks: int = 5) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(blocks)))
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(x))
        return out


class Greedy(Net):
    """Keeps another MiB of its own once any module is checkpointed."""

    extra: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.extra is None and is_changed(self):
            self.extra = torch.ones(2**18)
        return super().forward(x)


class Counting(Net):
    """Counts its calls in buffers of its blocks, which a second forward would count twice."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.layers:
            block.register_buffer("calls", torch.zeros(1))
            block.forward = partial(self.counted, block, block.forward)

    @staticmethod
    def counted(block: Any, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        block.calls += 1
        return forward(x)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No test leaves a hook of an optimizer, or a temporary file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    gc.collect()  # an optimizer and what moves its state refer to each other
    assert not torch_optimizer._global_optimizer_post_hooks
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not list(tmp_path.glob("memprof-*"))


def is_changed(model: nn.Module) -> bool:
    return any("forward" in module.__dict__ for module in model.modules())


def train(
    begin: Callable[[nn.Module, torch.optim.Optimizer], LiveFit | None],
    kind: Callable[[], nn.Module] = Net,
    steps: int = STEPS,
) -> tuple[list[float], list[torch.Tensor], LiveFit | None]:
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fit = begin(model, optimizer)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(1024, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach().clone() for parameter in model.parameters()], fit


def fitted(budget: str | int, kind: Callable[[], nn.Module] = Net, steps: int = STEPS, **options: Any) -> Any:
    losses, parameters, fit = train(
        lambda model, optimizer: memprof.make_fit(model, optimizer, budget, **options), kind, steps
    )
    assert fit is not None
    return losses, parameters, fit


@pytest.mark.parametrize("options", [{"allow": ["checkpoint"]}, {}], ids=["checkpoint", "default"])
def test_job_fits_and_computes_the_same(options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The peak measured is within the budget; losses and parameters are equal to the bit, dropout and all.

    `undo` leaves the model as it was.
    """
    plain, before, _ = train(lambda *_: None)
    losses, after, fit = fitted("60%", **options)
    assert losses == plain
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert fit.is_done
    assert fit.plan is not None
    assert {policy.name for policy in fit.plan.policies} <= {"checkpoint", "swap"}
    said = capsys.readouterr().err
    assert f"make_fit: applied {fit.plan.describe()}" in said
    assert "within the budget, measured: " in said
    assert "Recording has stopped" in said
    # Later steps on a CPU are not monitored, and the message says so.
    assert "not monitored" in said
    assert fit.predicted_bytes == pytest.approx(fit.measured_bytes, rel=0.02)
    model = fit.job.model
    assert is_changed(model)
    fit.undo()
    assert not is_changed(model)
    assert fit.plan is None


def test_job_that_fits_is_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """No plan is invented where the budget is met; it warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, _, fit = fitted("1GiB", steps=6)
    assert fit.is_done
    assert fit.plan is None
    assert 0 < fit.measured_bytes < 2**30
    assert "already fits" in capsys.readouterr().err


def test_nothing_fits_warns_with_the_least_peak() -> None:
    """Training goes on as it was; the warning names the least peak, and what was allowed."""
    plain, _, _ = train(lambda *_: None)
    with pytest.warns(UserWarning, match=r"no plan within 1.00 KiB.* lowest found is .*MiB with checkpoint"):
        losses, _, fit = fitted("1KiB", allow=["checkpoint"], time_limit=5.0)
    assert losses == plain
    assert fit.plan is None
    assert fit.is_done


def test_modules_that_cannot_run_again_are_left_alone() -> None:
    """What a plan would break is not planned: buffers counted in forward are counted once a step."""
    plain, _, _ = train(lambda *_: None, Counting)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there may be nothing left that fits
        losses, _, fit = fitted("60%", Counting, allow=["checkpoint"])
    assert losses == plain
    assert fit.is_done
    assert all(float(block.calls) == STEPS for block in fit._model.layers)


def test_step_above_its_prediction_warns_and_tightens() -> None:
    """A plan whose step exceeds the budget is reverted, and one with more headroom is tried."""
    with pytest.warns(UserWarning, match=r"OVER the budget by .* under checkpoint .*, predicted: "):
        _, _, fit = fitted("80%", Greedy, steps=16, allow=["checkpoint"])
    assert fit.is_done
    assert fit.plan is not None
    assert fit.measured_bytes > fit.predicted_bytes


def test_any_loop_that_steps_an_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    """Batches in parts, two optimizers, one that never steps, and hooks of the job's own come in one loop."""
    idle = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    updates = []
    torch.manual_seed(0)
    model = Net()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.layers, model.head)]
    fit = memprof.make_fit(model, optimizers, "70%", allow=["checkpoint"])
    own = torch_optimizer.register_optimizer_step_post_hook(lambda *_: updates.append(1))
    for _ in range(14):
        for _ in range(2):
            model(torch.randn(1024, 64)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    own.remove()
    assert len(updates) == 28
    assert fit.is_done, fit.reason
    assert fit.plan is not None
    assert fit.measured_bytes == pytest.approx(fit.predicted_bytes, rel=0.02)
    assert idle.param_groups


def test_several_models_are_planned_for_each_by_its_name() -> None:
    """In a recording of two models patterns begin with the model's type, in the model itself they do not."""
    names = [name for name, _ in Net().named_modules()]
    plan = plan_for(Plan((Checkpoint(("Net.layers.*", "layers.0")),)), "Net", names)
    assert plan == Plan((Checkpoint(("layers.*", "layers.0")),))
    with pytest.raises(PolicyError):
        plan_for(Plan((Checkpoint(("Critic.blocks.*",)),)), "Net", names)


def test_policies_that_need_the_start_of_a_job_are_refused() -> None:
    """Each says why it cannot be applied in the middle of training; what is allowed by default changes no number."""
    refused = [kind.name for kind in policy_types() if kind.live_refusal]
    for name in refused:
        with pytest.raises(PolicyError, match=r"in the middle of training: .*memprof fit"):
            live_policies((name,), ())
    assert live_policies((), ()) == ("checkpoint", "swap")
    assert all(kind.numerics == "none" for kind in policy_types() if kind.tried_live)
    assert refused == ["shard", "accumulate", "optimizer", "compile", "remat", "allocator"]
    with pytest.raises(PolicyError, match="no policy is left"):
        live_policies(("swap",), ("swap",))


def test_mistakes_are_told_at_once() -> None:
    """An invalid budget or model is refused at the call; nothing has started."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="budget"):
        memprof.make_fit(model, optimizer, "0%")
    with pytest.raises(PolicyError, match="Module"):
        memprof.make_fit(lambda x: x, optimizer, "1GiB")  # type: ignore[arg-type]  # what users write
    with pytest.raises(UsageError, match="slowdown"):
        memprof.make_fit(model, optimizer, "1GiB", max_slowdown=-1.0)
    first = memprof.make_fit(model, optimizer, "1GiB")
    with pytest.raises(UsageError, match="already active in this process"):
        memprof.make_fit(model, optimizer, "1GiB")
    first.undo()


def test_job_that_ends_early_says_so(temporary: Path) -> None:
    """A job of two steps ends as without memprof: a message says that nothing was planned, and no file is left."""
    script = """
import torch, memprof
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
memprof.make_fit(model, optimizer, budget="60%")
for _ in range(2):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "memprof: make_fit: the job ended before enough steps were observed to plan from.\n"


@pytest.mark.gpu
def test_later_steps_are_watched_on_a_device() -> None:
    """A later step that takes more than any before is reported, from the device's own counter."""

    def on_device() -> nn.Module:
        return Net().cuda()

    torch.manual_seed(0)
    model = on_device()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit = memprof.make_fit(model, optimizer, "1GiB")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where CUDA is not recorded, it says so and stops
        for _ in range(6):
            model(torch.randn(512, 64, device="cuda")).square().mean().backward()
            optimizer.step()
    assert fit.is_done
    if not fit.measured_bytes:
        fit.undo()
        pytest.skip(fit.reason)
    model(torch.randn(2**16, 64, device="cuda")).square().mean().backward()
    with pytest.warns(UserWarning, match="a step took"):
        optimizer.step()
    fit.undo()
