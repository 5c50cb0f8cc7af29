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
from memprof.replay.live import live_bytes
from tests.policies.faces import compare
from tests.policies.small_jobs import Small, peak, record, supervised

BF16, FP16, PURE = Precision("bf16"), Precision("fp16"), Precision("bf16", "bf16")
SWAP = Swap(to="disk")


def normalized() -> Small:
    layers = [nn.Conv2d(16, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True), nn.LeakyReLU(inplace=True)]
    return supervised(nn.Sequential(*layers, nn.Conv2d(16, 16, 3, padding=1)), (4, 16, 32, 32))


def in_place() -> Small:
    layers = [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Hardswish(inplace=True)]
    return supervised(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)), (8, 16, 32, 32))


def products() -> Small:
    layers = [nn.Linear(50, 200), nn.ReLU(), nn.Linear(200, 64), nn.ReLU(), nn.Linear(64, 512), nn.ReLU()]
    return supervised(nn.Sequential(*layers, nn.Linear(512, 10)), (300, 50))


def holding() -> Small:
    """``logits, loss = model(x, y)``: the loop holds the logits until it has the next ones."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(3000, 32), nn.Linear(32, 3000)

        def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.head(self.embed(ids))
            return logits, F.cross_entropy(logits, ids)

    model, held = Model(), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        held["logits"], held["loss"] = model(torch.randint(0, 3000, (256,)))
        held["loss"].backward()
        optimizer.step()

    return Small([model], step, [optimizer])


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


def returning() -> Small:
    """A model that returns an object of its own beside its output, which the loop holds until the next."""

    class Result:
        def __init__(self, layers: list[torch.Tensor]) -> None:
            self.layers = layers

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Result]:
            made = [x]
            for layer in self.layers:
                made.append(layer(made[-1]))
            return made[-1], Result(made[1:-1])

    model, held = Layers(), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        held["out"] = model(torch.randn(512, 64))
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


def logarithms() -> Small:
    """Logarithms of probabilities come out of the model, and the likelihood is taken outside: no cross_entropy."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(500, 32), nn.Linear(32, 500)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.log_softmax(self.head(self.embed(ids)), dim=-1)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        ids = torch.randint(0, 500, (256,))
        output = model(ids)
        F.nll_loss(output, ids).backward()
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


def gathered() -> Small:
    """A gather of products, whose node keeps them for their size alone."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)
            self.register_buffer("places", torch.randint(0, 64, (8, 64, 32)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = torch.bmm(self.left(x), self.right(x).transpose(1, 2))
            return torch.gather(scores, -1, self.places)

    return supervised(Model(), (8, 64, 64))


def transformed() -> Small:
    """A Fourier transform, which autocast gives a float32 copy, and whose node keeps that for its size alone."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(64, 64), nn.Linear(64, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.leave(torch.fft.rfft(self.enter(x), dim=1).abs())

    return supervised(Model(), (8, 256, 64))


def spectral() -> Small:
    """Complex weights, as Fourier neural operators have: so is their optimizer's state."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(96, 96, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft(torch.fft.rfft(x, dim=1) @ self.weight, dim=1)

    return supervised(Model(), (2, 8, 96), torch.optim.Adam)


def pooled() -> Small:
    """The largest of each row: backward scatters, and in a short type sums up in float32."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(16, 128), nn.Linear(128, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.leave(self.enter(x).max(1).values)

    return supervised(Model(), (8, 256, 16))


def gated() -> Small:
    """A recurrent layer outside oneDNN, with short inputs, and so with short first states."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.layer = nn.Linear(32, 64), nn.GRU(64, 64, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.enter(x))[0]

    return supervised(Model(), (16, 40, 32))


def fine_tuned() -> Small:
    backbone, head = nn.Sequential(nn.Linear(64, 512), nn.ReLU()), nn.Sequential(nn.Linear(512, 128), nn.ReLU())
    backbone.requires_grad_(requires_grad=False)
    optimizer = torch.optim.Adam(head.parameters())

    def step() -> None:
        optimizer.zero_grad()
        head(backbone(torch.randn(64, 64))).pow(2).mean().backward()
        optimizer.step()

    job = Small([head], step, [optimizer])
    step.__dict__["backbone"] = backbone
    return job


@pytest.mark.parametrize(
    ("make", "policy", "bar"),
    [
        (normalized, BF16, 0.03),
        (in_place, BF16, 0.03),
        (products, BF16, 0.001),
        (adversarial, BF16, 0.01),
        (caching, SWAP, 0.001),
        (logarithms, BF16, 0.01),
        (holding, ChunkedLoss(8, head="head", minimum_bytes=0), 0.001),
        (holding, ChunkedLoss(8, minimum_bytes=0), 0.001),
        (gathered, BF16, 0.01),
        (pooled, BF16, 0.01),
        (transformed, BF16, 0.01),
        (spectral, Swap(what="optimizer", to="disk"), 0.001),
        (gated, BF16, 0.05),
        (fine_tuned, PURE, 0.01),
        (two_headed, Checkpoint(("*",)), 0.0),
    ],
    ids=lambda value: getattr(value, "__name__", None) or getattr(value, "describe", lambda: "")(),
)
def test_prediction_is_the_measured_peak(make, policy, bar, tmp_path):
    """Norms with repeated weights, in-place activations, any product, two models, a frozen one: all as measured."""
    predicted = policy.transform(record(make, tmp_path))
    measured = record(make, tmp_path, policy)
    assert abs(peak(predicted) - peak(measured)) <= bar * peak(measured), compare(predicted, measured)


def test_what_the_step_before_left_is_short_too(tmp_path):
    """A step begins with the outputs of the one before in the types that its own will have, cast to float32 or not."""
    predicted, measured = BF16.transform(record(returning, tmp_path)), record(returning, tmp_path, BF16)
    assert live_bytes(predicted).during[0] == live_bytes(measured).during[0]


def test_a_recurrent_layer_that_evaluates_has_what_it_keeps_in_training_as_a_temporary(tmp_path):
    """A larger batch in evaluation is the peak, and bf16 about halves it."""

    def make() -> Small:
        model = nn.LSTM(32, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(20, 4, 32))[0].pow(2).mean().backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.randn(20, 64, 32))

        return Small([model], step, [optimizer])

    plain = record(make, tmp_path)
    try:
        predicted = BF16.transform(plain)
    except PolicyError as error:
        pytest.skip(str(error))  # a processor for which oneDNN has no such kernel
    measured = record(make, tmp_path, BF16)
    assert peak(measured) < peak(plain) - 400_000  # of what the layer has then, about half
    assert peak(predicted) == pytest.approx(peak(measured), rel=0.03), compare(predicted, measured)


def test_what_a_forward_began_with_is_held_as_long_as_its_source_names_it(tmp_path):
    """A forward that goes on under other names keeps its input, which swap then cannot free."""
    plain = record(renaming, tmp_path)
    predicted = Plan((SWAP,)).predict(plain)[0].prediction
    measured = peak(record(renaming, tmp_path, SWAP))
    assert predicted.peak_allocated_bytes == measured <= predicted.interval.most_bytes <= 1.01 * measured


def test_weight_updated_inside_backward_has_its_cast_gradient_before(tmp_path):
    """A script that updates each parameter inside backward: its gradient is cast before that update, not after."""

    hooks = []

    def make() -> Small:
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def update(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            parameter.grad = None

        hooks.extend(parameter.register_post_accumulate_grad_hook(update) for parameter in model.parameters())
        return Small([model], lambda: model(torch.randn(16, 32)).sum().backward())

    predicted = BF16.transform(record(make, tmp_path))
    gradients = predicted.storages.take(predicted.storages.category == "gradient")
    assert set(gradients.dtype) == {"float32"}
    OptimizerPolicy(loop="foreach").transform(record(make, tmp_path)).check()
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


_ROWS = torch.arange(16)
_MIXES = {
    "index_add_": lambda out, made: out.index_add_(0, _ROWS, made),
    "lerp": lambda out, made: torch.lerp(out, made, 0.5),
    "scatter_reduce": lambda out, made: out.scatter_reduce(0, _ROWS[:, None].expand(16, 32), made, "sum"),
}


@pytest.mark.parametrize("name", _MIXES)
def test_types_that_autocast_cannot_mix_are_refused(name, tmp_path):
    """What would break under autocast (index_add_ into float32) is refused when it is predicted, by its name."""

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.expert = nn.Linear(32, 32)

        def forward(self, x):
            return _MIXES[name](torch.zeros_like(x), self.expert(x))

    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        Routed()(torch.randn(16, 32))
    step = record(lambda: supervised(Routed(), (16, 32)), tmp_path)
    with pytest.raises(PolicyError, match=f"{name} in Routed would mix float32 and short operands"):
        BF16.transform(step)


def test_autocast_of_the_script_is_not_overruled(tmp_path):
    """A script under bf16 autocast stays as it is with bf16, and is refused another type."""

    def make() -> Small:
        job = supervised(nn.Linear(32, 32), (16, 32))

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                job.step()

        return Small(job.models, step, job.optimizers)

    step = record(make, tmp_path)
    assert peak(BF16.transform(step)) == peak(step)
    for policy in (FP16, PURE):
        with pytest.raises(PolicyError, match="already runs under autocast, in bfloat16"):
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
