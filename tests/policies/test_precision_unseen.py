"""Precision on third-party jobs, on other processors, and for weights that are not trained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from memprof.errors import PolicyError
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from memprof.policies.precision.policy import Precision
from memprof.policies.rewrite.autocast_cache import cached_until, frozen_parameters
from memprof.policies.runtime.job import Job
from memprof.policies.swap.policy import Swap
from memprof.replay.live import live_bytes
from tests.recorder.recorded import Ended, record

FP16, PURE = Precision("fp16"), Precision("bf16", "bf16")


def test_gradients_may_be_computed_by_keyword():
    """torch.autograd's functions take what they differentiate by keyword, too, under fp16."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    FP16.apply(Job(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))
    x = torch.randn(3, 4, requires_grad=True)
    (by_keyword,) = torch.autograd.grad(outputs=model(x).sum(), inputs=x)
    (by_place,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(by_keyword, by_place)
    torch.autograd.backward(tensors=model(x).sum())
    assert model[0].weight.grad is not None
    with pytest.raises(PolicyError, match="create_graph=True"):
        torch.autograd.grad(outputs=model(x).sum(), inputs=x, create_graph=True)


class Batch:
    """What some libraries call their models with: an object that holds tensors."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class OfBatches(nn.Module):
    """Takes what it computes with out of an object."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.second(self.first(batch.x).relu().float())


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_tensors_out_of_objects_are_made_short(is_checkpointed):
    """A part of a model with short weights takes float32 that the model hands it, also where it runs again."""
    model = OfBatches()
    job = Job(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    PURE.apply(job)
    if is_checkpointed:
        Checkpoint(("first",)).apply(job)
    loss = model(Batch(torch.randn(4, 8))).sum()
    loss.backward()
    assert loss.dtype == torch.float32
    assert model.first.weight.grad.dtype == torch.bfloat16


def test_types_that_do_not_mix_are_said_in_a_sentence():
    """An operator that takes one type, given a tensor the model created in float32, ends the job with a message."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) @ torch.zeros(8, 3)

    model = Product()
    PURE.apply(Job(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))
    with pytest.raises(PolicyError, match=r"Product does not run in bfloat16: .*same dtype.*write bf16"):
        model(torch.randn(4, 8))


@pytest.mark.parametrize("policy", [Precision("bf16"), PURE], ids=["autocast", "pure"])
def test_what_a_forward_gives_to_numpy_is_float32(policy):
    """NumPy has no bfloat16; after the plan is undone, torch's own method is back, or that under the plan before."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
            y = self.linear(x)
            return y, np.asarray(y.detach())

    before = vars(torch.Tensor).get("numpy")
    model = Weighted()
    job = Job(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    policy.apply(job)
    assert torch.ones(2, dtype=torch.bfloat16).numpy().dtype == np.float32
    outputs, seen = model(torch.randn(2, 4))
    assert seen.dtype == np.float32
    assert torch.equal(torch.from_numpy(seen), outputs.detach())
    job.undo()
    assert vars(torch.Tensor).get("numpy") in (None, before)  # plans of earlier tests may end meanwhile


_RECURRENT = """
import torch
from memprof.errors import PolicyError
from memprof.policies.precision.policy import Precision
from memprof.policies.runtime.job import Job
try:
    Precision("bf16").apply(Job(torch.nn.LSTM(2, 2)))
except PolicyError as error:
    assert "cannot train recurrent layers in bf16 on this processor" in str(error)
else:
    raise AssertionError
"""


def _run_at(level: str, code: str) -> int:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": level}
    return subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode


def test_recurrent_layers_are_refused_where_onednn_has_none() -> None:
    """Torch would end the job in its first step: it could not create a primitive."""
    assert _run_at("AVX2", _RECURRENT) == 0


@pytest.mark.parametrize("level", ["", "AVX", "AVX2", "AVX512_CORE", "AVX512_CORE_BF16", "AVX512_CORE_AMX", "ALL"])
def test_types_are_those_that_torch_asks_onednn_for(level: str) -> None:
    """The recorder reads them off the processor's instructions, since the job would see torch's own question."""
    ask = (
        "import torch; from memprof.recorder.machine import short_types; "
        "ops = torch.ops.mkldnn; names = {'bfloat16': 'bf16', 'float16': 'fp16'}; "
        "assert short_types() == [n for n, s in names.items() if getattr(ops, f'_is_mkldnn_{s}_supported')()]"
    )
    assert _run_at(level, ask) == 0


_JOB = """
import torch
from torch import nn
from torch.nn import functional as F

class Adapted(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(width, out), nn.Linear(width, 4), nn.Linear(4, out)
        self.base.requires_grad_(False)
    def forward(self, x):
        return self.base(x) + self.up(self.down(x))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Adapted(64, 256), Adapted(256, 64)
    def forward(self, x):
        return x + self.second(F.relu(self.first(x)))

torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(4)))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
rows = torch.randn(32, 64)
for step in range(6):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(rows).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
"""


def trained(folder: Path) -> Ended:
    (folder / "job.py").write_text(_JOB)
    return record(folder, "job.py")


@pytest.mark.parametrize(
    "policy", [Swap(modules=("0", "1", "2"), to="disk"), Checkpoint(modules=("0", "1", "2"))], ids=lambda one: one.name
)
def test_copies_of_frozen_weights_are_predicted(policy: Policy, tmp_path: Path) -> None:
    """The predicted peak is the measured one; with frozen weights in the cache, most would be too high."""
    plain = trained(tmp_path)
    plan = Plan((policy,))
    write_plan(tmp_path / "plan.toml", plan)
    under = record(tmp_path, "--plan", "plan.toml", "job.py", name="under.memprof")
    predicted = int(live_bytes(plan.transform(plain.step)).during.max())
    assert abs(predicted - under.peak) <= 16, (predicted, under.peak)


def test_frozen_weights_are_found(tmp_path: Path) -> None:
    """They are those without a gradient in any step, and no copy of them is cached."""
    step = trained(tmp_path).step
    storages = step.storages
    frozen = {str(name) for name in storages.name[frozen_parameters(step)]}
    assert frozen == {
        f"{block}.{layer}.base.{kind}"
        for block in range(4)
        for layer in ("first", "second")
        for kind in ("weight", "bias")
    }
    cached = np.flatnonzero(cached_until(step, np.zeros(len(storages), dtype=np.bool_)) != -1)
    assert len(cached) == 4 * 2 * 4  # two adapted layers in each of four blocks, each with four trained parameters


def test_weights_without_a_gradient_that_require_one_are_cached(tmp_path: Path) -> None:
    """As a target network's that is a copy of the model: autocast keeps casts of them, also without gradients."""
    job = _JOB.replace("        self.base.requires_grad_(False)\n", "")
    job = job.replace(
        "return self.base(x) +", "with torch.no_grad():\n            y = self.base(x)\n        return y +"
    )
    (tmp_path / "job.py").write_text(
        job.replace("[p for p in model.parameters() if p.requires_grad]", "model.parameters()")
    )
    step = record(tmp_path, "job.py").step
    assert not frozen_parameters(step).any()


def test_an_unused_parameter_leaves_frozen_weights_frozen(tmp_path: Path) -> None:
    """The optimizer has a parameter without a gradient, but the base weights require none and are not cached."""
    job = _JOB.replace("optimizer =", "model.register_parameter('unused', nn.Parameter(torch.ones(3)))\noptimizer =")
    (tmp_path / "job.py").write_text(job)
    step = record(tmp_path, "job.py").step
    assert frozen_parameters(step).sum() == 4 * 2 * 2
