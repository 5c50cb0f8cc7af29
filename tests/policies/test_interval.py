"""The bounds of a predicted peak, the upper of which must fit the budget."""

from __future__ import annotations

import dataclasses
import gc
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memprof
from memprof.planners.search.explore import SearchRequest, explore
from memprof.planners.search.workbench import Workbench
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.interval import Interval, interval_of
from memprof.policies.plan.plan import Plan
from memprof.policies.precision.policy import Precision
from memprof.policies.registry import policy_types
from memprof.policies.remat.policy import Remat
from memprof.policies.runtime.job import Job
from memprof.policies.swap.policy import Swap
from memprof.replay.live import live_bytes
from memprof.trace.store import Trace
from memprof.units import format_bytes_between
from tests.policies.faces import record_step, recorded

BF16, PURE = Precision("bf16"), Precision("bf16", "bf16")


def interval(step, *policies):
    """Returns the bounds of a plan."""
    found = Plan(policies).predict(step)[0].prediction.interval
    assert found is not None
    return found


def test_what_is_replayed_is_known_to_the_byte():
    step = recorded("gpt")
    peak = int(live_bytes(Checkpoint(("layers.*",)).transform(step)).during.max())
    assert interval(step, Checkpoint(("layers.*",))) == Interval(peak, peak)
    assert interval(step).is_exact


@pytest.mark.parametrize(
    "kind", [kind for kind in policy_types() if kind.source == "modelled"], ids=lambda kind: kind.name
)
def test_what_is_modelled_has_been_off(kind):
    """Every policy that does not replay alone says by how much it was off."""
    below, above = kind.errors_seen
    assert (below > 0 and above > 0) or kind is Precision
    assert 0 <= below < 0.2
    assert 0 <= above < 0.2


@pytest.mark.parametrize("job", ["gpt", "resnet", "lstm", "vit", "unet"])
def test_measured_peaks_lie_between(job):
    """The bounds hold on the samples, and errors of several policies add up."""
    step = recorded(job)
    bounds = interval(step, BF16)
    measured = int(live_bytes(record_step(job, Plan((BF16,)))).during.max())
    assert bounds.least_bytes <= measured <= bounds.most_bytes
    swapped = interval(step, Swap(what="optimizer", to="disk"), BF16)
    peak = int(live_bytes(Plan((Swap(what="optimizer", to="disk"), BF16)).transform(step)).during.max())
    assert swapped.most_bytes - peak >= bounds.most_bytes - int(live_bytes(BF16.transform(step)).during.max())


class OwnCasts(nn.Module):
    """Computes its softmax in float32, as many models do: in a float32 run, nothing of that is recorded."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 64)
        self.query, self.key, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, words):
        x = self.embedding(words)
        for _ in range(3):
            scores = self.query(x) @ self.key(x).transpose(1, 2)
            x = F.softmax(scores, dim=-1, dtype=torch.float32).type_as(scores) @ x.type_as(scores)
        return self.head(x)


class OwnScan(nn.Module):
    """Runs a recurrence in float32 and casts its result back, as state-space models do."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 64), nn.Linear(64, 32)
        self.enter, self.rates = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)), nn.Parameter(torch.randn(64, 8))

    def forward(self, words):
        x = self.embedding(words)
        for layer in self.enter:
            steps = F.softplus(layer(x).float())
            decay = torch.exp(-torch.exp(self.rates.float()) * steps[..., None])
            x = (decay * x.float()[..., None]).mean(-1).to(x.dtype)
        return self.head(x)


class Layered(nn.Module):
    """Has layers between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 64), nn.Linear(64, 32)
        self.enter = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))


class OwnNorm(Layered):
    """Normalizes the short results of its products in float32, as models do that normalize queries and keys."""

    def normalize(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, words):
        x = self.embedding(words)
        for layer in self.enter:
            x = self.normalize(layer(x).float()).to(torch.bfloat16 if torch.is_autocast_enabled("cpu") else x.dtype)
        return self.head(x)


class Adapted(Layered):
    """Casts the input of small trained layers beside frozen ones to the type of their weights, as adapters do."""

    def __init__(self):
        super().__init__()
        self.enter.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(64, 8) for _ in range(4))
        self.up, self.drop = nn.ModuleList(nn.Linear(8, 64) for _ in range(4)), nn.Dropout(0.1)
        self.head = nn.Linear(64, 512)  # its logits are the peak

    def adapt(self, x, down, up):
        x = x.to(down.weight.dtype)
        return up(down(self.drop(x)))

    def forward(self, words):
        x = self.embedding(words)
        for layer, down, up in zip(self.enter, self.down, self.up, strict=True):
            x = layer(F.gelu(layer(x)))
            x = x + self.adapt(x, down, up)
        return self.head(x)


class OwnBuffer(Layered):
    """Writes its results into a buffer of their type, which a recording in float32 takes for one of float32."""

    def forward(self, words):
        x = self.embedding(words)
        for layer in self.enter:
            x = layer(x)
        kept = torch.empty(16, *x.shape, dtype=x.dtype)
        kept[0] = x.detach()
        return self.head(x)


def own_casts_step(path, *policies, kind=OwnCasts):
    gc.collect()  # models that other tests left would be in one recording and not in the other
    torch.manual_seed(0)
    model, words = kind(), torch.randint(0, 32, (8, 96))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for policy in policies:
        policy.apply(Job(model, [optimizer]))
    with memprof.record(path, skip=1, steps=1, force=True):
        for _ in range(2):
            F.cross_entropy(model(words).flatten(0, 1).float(), words.view(-1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return Trace.open(path).fullest_step()


@pytest.mark.parametrize(
    ("policy", "kind"),
    [(BF16, OwnCasts), (PURE, OwnCasts), (PURE, OwnScan), (BF16, OwnNorm), (BF16, Adapted)],
    ids=["autocast", "short", "back and forth", "norm", "to a weight's type"],
)
def test_casts_of_the_models_own_are_predicted(policy, kind, tmp_path):
    """To the byte where the source was read. Otherwise the prediction is too low by far; its upper end is not.

    The upper end covers casts to float32, and not those to a weight's type.
    """
    step = own_casts_step(tmp_path / "base.memprof", kind=kind)
    measured = int(live_bytes(own_casts_step(tmp_path / "head.memprof", policy, kind=kind)).during.max())
    assert int(live_bytes(policy.transform(step)).during.max()) == measured
    unread = dataclasses.replace(step, own_casts=None, own_float32=frozenset(), own_weight_type=frozenset())
    assert measured > int(live_bytes(policy.transform(unread)).during.max()) + 100_000
    for bounds in (interval(step, policy), *([] if kind is Adapted else [interval(unread, policy)])):
        assert bounds.least_bytes <= measured <= bounds.most_bytes


def test_type_of_a_tensor_made_without_another_is_open(tmp_path):
    """``empty(shape, dtype=x.dtype)`` is predicted in float32; the lower bound has it short."""
    step = own_casts_step(tmp_path / "base.memprof", kind=OwnBuffer)
    measured = int(live_bytes(own_casts_step(tmp_path / "head.memprof", BF16, kind=OwnBuffer)).during.max())
    bounds = interval(step, BF16)
    assert int(live_bytes(BF16.transform(step)).during.max()) > 1.2 * measured
    assert bounds.least_bytes <= measured <= bounds.most_bytes


def test_code_without_casts_narrows_the_bounds(tmp_path):
    """The same softmax, with code that names no type and with code that was not read."""
    step = own_casts_step(tmp_path / "base.memprof", kind=OwnCasts)
    assert step.own_casts
    step = dataclasses.replace(step, own_float32=frozenset())
    without, unread = (dataclasses.replace(step, own_casts=casts) for casts in (frozenset(), None))
    assert interval(without, BF16).most_bytes < interval(step, BF16).most_bytes == interval(unread, BF16).most_bytes


def step_beside_a_graph(path, *policies):
    """Records a step during which a variable keeps the graph of an evaluation that ran before, with gradients on."""
    gc.collect()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*layers)
    inputs, optimizer = torch.randn(128, 64), torch.optim.SGD(model.parameters(), 0.1)
    for policy in policies:
        policy.apply(Job(model, [optimizer]))
    held = None
    with memprof.record(path, skip=1, steps=1, force=True):
        for _ in range(2):
            held = held if held is not None else model(inputs)
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return Trace.open(path).fullest_step()


def test_what_an_earlier_forward_left_may_be_less_under_a_plan(tmp_path):
    """The recording does not show what that forward saved: the lower bound is without it, the upper one with it."""
    step = step_beside_a_graph(tmp_path / "base.memprof")
    swap = Swap((".",), to="disk")
    measured = int(live_bytes(step_beside_a_graph(tmp_path / "swap.memprof", swap)).during.max())
    predicted = int(live_bytes(swap.transform(step)).during.max())
    assert measured < 0.85 * predicted
    bounds = interval(step, swap)
    assert bounds.least_bytes <= measured <= predicted <= bounds.most_bytes
    idle = 4 * 128 * 256 * 4  # what tanh saved
    assert bounds.most_bytes - bounds.least_bytes > idle
    assert interval(step, OptimizerPolicy(loop="loop")).least_bytes > predicted - idle  # it changes no forward
    shown = interval_of((BF16,), (step,), (step,), dry_steps={(BF16,): (step,)})  # a dry run of the plan shows it
    assert shown.is_exact


def test_remat_holds_the_job_whatever_is_not_known():
    """But for what kernels take meanwhile, which is known when it is taken."""
    step = recorded("gpt")
    budget = int(0.8 * live_bytes(step).during.max())
    predicted = int(live_bytes(Plan((Remat(budget=str(budget)), BF16)).transform(step)).during.max())
    assert interval(step, Remat(budget=str(budget)), BF16).most_bytes <= max(1.02 * budget, predicted)


def test_precision_is_less_sure_beside_what_handles_saved_tensors():
    """What runs again in the short type, or is moved in it, was further off than either alone."""
    step = recorded("gpt")

    def width(*policies):
        bounds = interval(step, *policies)
        return bounds.most_bytes - int(live_bytes(Plan(policies).transform(step)).during.max())

    beside = width(BF16, Checkpoint(("layers.*",)))
    assert beside > width(BF16)
    assert width(Checkpoint(("layers.*",))) == 0


def test_a_plan_fits_with_its_upper_end():
    """Unless plans are checked: then the predicted peak has to fit."""
    step = recorded("gpt")
    bench = Workbench(step, deadline=math.inf)
    one = bench.try_plan(BF16)
    assert one is not None
    assert one.peak_bytes < one.interval.most_bytes
    assert bench.fitting(one.peak_bytes) == []
    assert bench.fitting(one.interval.most_bytes) == [one]
    checked = Workbench(step, deadline=math.inf, needed=SearchRequest(0, is_checked=True).needed)
    assert checked.try_plan(BF16) in checked.fitting(one.peak_bytes)
    search_request = SearchRequest(one.peak_bytes, allow=("precision",), time_limit_s=20)
    assert explore(step, search_request).best is None
    assert explore(step, dataclasses.replace(search_request, is_checked=True)).best == one


def test_a_plan_file_holds_its_bounds(tmp_path):
    """Written by predict, read back by verify; plans of older versions have none."""
    from memprof.policies.plan.plan_file import read_plan, write_plan

    plan, _ = Plan((BF16,)).predict(recorded("gpt"))
    write_plan(tmp_path / "plan.toml", plan)
    assert read_plan(tmp_path / "plan.toml").prediction.interval == plan.prediction.interval
    text = (tmp_path / "plan.toml").read_text()
    older = "\n".join(line for line in text.splitlines() if "t_peak_bytes" not in line or "recorded" in line)
    (tmp_path / "older.toml").write_text(older)
    assert read_plan(tmp_path / "older.toml").prediction.interval is None


@pytest.mark.parametrize(
    ("least", "most", "text"),
    [(1 << 20, 1 << 20, "1.00 MiB"), (1 << 20, 3 << 19, "1.00 to 1.50 MiB"), (1000, 3 << 19, "1000 B to 1.50 MiB")],
)
def test_bounds_in_words(least, most, text):
    assert format_bytes_between(least, most) == text


def test_suggest_says_bounds_and_proposes_the_check(tmp_path):
    """From the command line: what is not known to the byte is shown as such, and checked first."""
    command = [sys.executable, "-m", "memprof", "suggest", "sample_traces/gpt/run.memprof", "--budget", "70%"]
    done = subprocess.run([*command, "--allow", "precision"], capture_output=True, text=True, check=True)
    assert ", not checked, step time" in done.stdout.splitlines()[0]
    following = [line for line in done.stdout.splitlines() if line.startswith("next: ")]
    assert "--check" in following[0]
    exact = subprocess.run([*command, "--allow", "checkpoint"], capture_output=True, text=True, check=True)
    assert "not checked" not in exact.stdout
    assert "--write" in next(line for line in exact.stdout.splitlines() if line.startswith("next: "))
