"""Rules found on scripts no policy was developed on: small jobs of every kind, predicted and measured."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memprof.errors import PolicyError
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.loss.policy import ChunkedLoss
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan import Plan
from memprof.policies.precision.policy import Precision
from memprof.policies.runtime.job import Job
from memprof.policies.swap.policy import Swap
from tests.policies.faces import compare
from tests.policies.small_jobs import Small, peak, record, supervised

BF16, FP16, PURE = Precision("bf16"), Precision("fp16"), Precision("bf16", "bf16")
SWAP = Swap(to="disk")


def caching() -> Small:
    """A model whose output holds keys and values, as those with a cache do in training, too."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 96) for _ in range(3))
            self.register_buffer("older", torch.zeros(4, 0, 32), persistent=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
            cache = []
            for layer in self.layers:
                query, key, value = layer(x).chunk(3, dim=-1)
                cache.append((torch.cat([self.older, key], dim=1), torch.cat([self.older, value], dim=1)))
                x = x + F.scaled_dot_product_attention(query, *cache[-1])
            return x, cache

    model, held = Attends(), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        held["out"] = model(torch.randn(4, 64, 32))
        held["out"][0].pow(2).mean().backward()
        optimizer.step()

    return Small([model], step, [optimizer])


def renaming() -> Small:
    """A forward that goes on under another name: what it began with is held until it returns."""

    class Renames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Sequential(nn.Linear(32, 64), nn.Tanh())
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            embedded = self.embed(x)
            output = embedded
            for layer in self.layers:
                output = layer(output)
            with torch.no_grad():  # a statistic, and the fullest moment
                output.repeat(1, 32).std()
            return output

    model = Renames()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(512, 32)).sum().backward()
        optimizer.step()

    return Small([model], step, [optimizer])


def adversarial(kind=torch.optim.Adam) -> Small:
    maker = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 64))
    judge = nn.Sequential(nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
    first, second = kind(judge.parameters(), lr=1e-3), kind(maker.parameters(), lr=1e-3)

    def step() -> None:
        first.zero_grad()
        made = maker(torch.randn(64, 16))
        (judge(torch.randn(64, 64)).mean() - judge(made.detach()).mean()).backward()
        first.step()
        second.zero_grad()
        judge(made).mean().backward()
        second.step()

    return Small([maker, judge], step, [first, second])


def two_headed() -> Small:
    """One of a model's two results is unused in turn, and a variable holds its graph until the next step."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.first, self.second = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.body(x)
            return self.first(x), self.second(x)

    model, left = Heads(), []
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for turn in (0, 1):
            results = model(torch.randn(32, 64))
            results[turn].pow(2).mean().backward()
            left[:] = [results[1 - turn]]
        optimizer.step()

    return Small([model], step, [optimizer])


def spectral() -> Small:
    """Complex weights, as Fourier neural operators have: so is their optimizer's state."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(96, 96, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft(torch.fft.rfft(x, dim=1) @ self.weight, dim=1)

    return supervised(Model(), (2, 8, 96), torch.optim.Adam)


@pytest.mark.parametrize(
    ("make", "policy", "bar"),
    [
        (caching, SWAP, 0.001),
        (spectral, Swap(what="optimizer", to="disk"), 0.001),
        (two_headed, Checkpoint(("*",)), 0.0),
    ],
    ids=lambda value: getattr(value, "__name__", None) or getattr(value, "describe", lambda: "")(),
)
def test_prediction_is_the_measured_peak(make, policy, bar, tmp_path):
    """A cache, a returned graph, complex weights, two models: all as measured."""
    predicted = policy.transform(record(make, tmp_path))
    measured = record(make, tmp_path, policy)
    assert abs(peak(predicted) - peak(measured)) <= bar * peak(measured), compare(predicted, measured)


def test_what_a_forward_began_with_is_held_as_long_as_its_source_names_it(tmp_path):
    """A forward that goes on under other names keeps its input, which swap then cannot free."""
    plain = record(renaming, tmp_path)
    predicted = Plan((SWAP,)).predict(plain)[0].prediction
    measured = peak(record(renaming, tmp_path, SWAP))
    assert predicted.peak_allocated_bytes == measured <= predicted.interval.most_bytes <= 1.01 * measured


def test_weights_updated_inside_backward_are_predicted(tmp_path):
    """A script that updates each parameter inside backward: the predicted steps are consistent."""

    hooks = []

    def make() -> Small:
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def update(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            parameter.grad = None

        hooks.extend(parameter.register_post_accumulate_grad_hook(update) for parameter in model.parameters())
        return Small([model], lambda: model(torch.randn(16, 32)).sum().backward())

    for policy in (BF16, OptimizerPolicy(loop="foreach")):
        policy.transform(record(make, tmp_path)).check()
    # A hook that reaches its own parameter keeps both, and their optimizers, for ever.
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("policy", [BF16, OptimizerPolicy(loop="foreach"), ChunkedLoss(4, minimum_bytes=0)])
def test_step_shorter_than_its_operators_keeps_a_length(policy, tmp_path):
    """Where operators overlap, so that the step is shorter than their sum, the predicted step still takes time."""

    def make() -> Small:
        model = nn.Linear(32, 16)
        optimizer = torch.optim.Adam(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(64, 32)), torch.randint(16, (64,))).backward()
            optimizer.step()

        return Small([model], step, [optimizer])

    step = record(make, tmp_path)
    step = dataclasses.replace(step, duration_us=float(np.nansum(step.ops.duration_us)) / 20)
    assert policy.transform(step).duration_us > 0


def test_autocast_of_the_script_is_not_overruled(tmp_path):
    """A script under bf16 autocast has nothing to gain from bf16, and is refused another type."""

    def make() -> Small:
        job = supervised(nn.Linear(32, 32), (16, 32))

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                job.step()

        return Small(job.models, step, job.optimizers)

    step = record(make, tmp_path)
    for policy in (BF16, FP16, PURE):
        with pytest.raises(PolicyError, match="already computes in bfloat16"):
            policy.transform(step)


def test_output_that_is_a_dict_of_its_own_type_is_float32():
    """A model's output class that pytree does not know comes back as that class, in float32."""

    class Output(OrderedDict):
        pass

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return Output(logits=self.linear(x), count=3)

    model = Model()
    job = Job(model)
    BF16.apply(job)
    out = model(torch.randn(2, 4))
    job.undo()
    assert type(out) is Output
    assert out["logits"].dtype == torch.float32
    assert out["count"] == 3


def test_policy_that_fits_no_longer_ends_the_job_with_a_sentence(tmp_path):
    """What a policy finds out while the job trains ends it like any refusal: status 125, one sentence, no traceback."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(4, 4)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(6):\n    optimizer.zero_grad()\n    model(torch.randn(8, 4)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    command = [sys.executable, "-m", "memprof", "record", "--accumulate", "2", "-o", "run.memprof", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 125
    assert "its loop reads from no DataLoader" in done.stderr
    assert "Traceback" not in done.stderr
