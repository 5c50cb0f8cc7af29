"""Activation checkpointing where autograd keeps more, beside the job's own, and with caches of keys."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from memprof.errors import PolicyError
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from memprof.policies.runtime.job import Job
from memprof.replay.live import live_bytes
from memprof.trace.schema import NONE
from tests.policies.faces import peaks, record_step, recorded, train
from tests.recorder.recorded import record, record_script


@pytest.mark.parametrize(
    "flag",
    [
        "recurrent.cell",  # gates in place: their nodes keep clones
        "experts",  # index_add_ keeps what it adds, and reads its size only
        "convs",  # in place on a view
        "gate",
        "experts,convs.* keep=matmul",
    ],
)
def test_predicted_peak_is_the_measured_one_to_the_byte(flag):
    """Whatever a node of autograd's graph keeps is known: clones of what is overwritten, and what is never read."""
    policy = Checkpoint.from_flag(flag)
    assert peaks(policy.transform(recorded("inplace"))) == peaks(record_step("inplace", Plan((policy,))))


def test_training_stays_the_same_to_the_bit():
    """Also where forwards change their own tensors in place."""
    plan = Plan((Checkpoint.from_flag("recurrent,experts,convs,gate,turn"),))
    plain, under = train("inplace"), train("inplace", plan)
    assert under.losses == plain.losses
    assert all((under.gradients[name] == value).all() for name, value in plain.gradients.items())


def test_calls_without_gradients_are_no_regions():
    """A frozen teacher runs under no_grad: it is skipped, and is not a region."""
    with pytest.raises(PolicyError, match="backward runs through no call of teacher"):
        Checkpoint(modules=("teacher",)).transform(recorded("inplace"))


def test_functions_that_keep_what_they_made_are_refused():
    """An attribute of ctx stays where a saved tensor would be dropped; the trace shows no difference."""
    for modules in (("turn",), ("",)):
        with pytest.raises(PolicyError, match=r"autograd\.Function or .* keep tensors made on the way"):
            Checkpoint(modules=modules).transform(recorded("inplace"))


def test_regions_that_backward_runs_through_twice_are_refused():
    """With retain_graph a region is recomputed for each backward: this is refused; other cases are predicted."""
    step = recorded("inplace")
    # The backward of `out` comes again at the end of backward, as another one through the same graph would.
    module = step.modules.name.tolist().index("out")
    ops = step.ops
    rows = np.flatnonzero((ops.module_id == module) & (ops.forward_op_id != NONE))
    first = rows[ops.forward_op_id[rows] == ops.forward_op_id[rows[0]]]
    backward = np.flatnonzero(ops.phase == "backward")
    names, owners = ops.name.copy(), ops.forward_op_id.copy()
    last = backward[-len(first) :]
    names[last], owners[last] = names[first], owners[first]
    again = dataclasses.replace(step, ops=ops.replace(name=names, forward_op_id=owners))
    with pytest.raises(PolicyError, match="backward runs through out more than once"):
        Checkpoint(modules=("out",)).transform(again)
    Checkpoint(modules=("experts",)).transform(again).check()


def test_what_runs_again_already_is_refused():
    """A job with activation checkpointing of its own is predicted for the modules apart from that."""
    own = Checkpoint(modules=("experts",)).transform(recorded("inplace"))
    for modules in (("experts",), ("experts.router",), ("",)):
        with pytest.raises(PolicyError, match="already runs again in backward"):
            Checkpoint(modules=modules).transform(own)
    Checkpoint(modules=("recurrent",)).transform(own).check()


def test_a_buffer_that_forward_assigns_anew_is_refused():
    """A recompute would assign it again: two updates of an average in a step. A cache is assigned in one call."""

    class Average(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return (x - self.mean).tanh()

    job = Job(torch.nn.Sequential(torch.nn.Linear(4, 4), Average()))
    Checkpoint(modules=("1",)).apply(job)
    job.model(torch.ones(2, 4))
    with pytest.raises(PolicyError, match="1 changes"):
        job.model(torch.ones(2, 4))
    job.undo()


_JOB = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)
    def forward(self, x):
        return self.norm(self.second(F.gelu(self.first(x))))[:, None].squeeze(1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.tail = Stem(), nn.ModuleList(Block() for _ in range(3)), Block()
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.tail(x)

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.randn(512, 64)
for step in range(6):
    loss = model(rows).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("modules", [("stem",), ("tail",), ("stem", "tail"), ("stem.first", "stem.norm")])
def test_what_runs_again_by_itself_keeps_its_input(modules: tuple[str, ...], tmp_path: Path) -> None:
    """The output of a module that is run again is the input of one that the job runs again: it is held until then."""
    plan = Plan((Checkpoint(modules=modules),))
    step = record_script(tmp_path, _JOB).step
    predicted = int(live_bytes(plan.transform(step)).during.max())
    write_plan(tmp_path / "plan.toml", plan)
    under = record(tmp_path, "--plan", "plan.toml", "job.py", name="under.memprof")
    assert abs(predicted - under.peak) <= 16


#: The cache begins with two empty tensors.
_CACHE_JOB = """
import torch
from torch import nn

class Cache:  # an object, as transformers' is
    def __init__(self):
        self.layers = []

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64, bias=False) for _ in range(4))
    def forward(self, x, cache):
        q, k, v = self.q(x), self.k(x), self.v(x)
        keys = torch.tensor([], dtype=k.dtype)
        values = torch.tensor([], dtype=k.dtype)
        keys = torch.cat([keys, k], dim=-2)
        values = torch.cat([values, v], dim=-2)
        cache.layers.append((keys, values))
        return x + self.o(torch.softmax(q @ keys.transpose(-1, -2), -1) @ values)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(4))
    def forward(self, x):
        cache = Cache()
        for layer in self.layers:
            x = layer(x, cache)
        return x.square().mean(), cache

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = torch.randn(8, 64, 64)
for step in range(6):
    loss = model(rows)[0]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_cache_is_held_until_the_last_region_that_was_given_it_is_done(tmp_path: Path) -> None:
    """Torch's checkpoint keeps a region's arguments: the cache, with the keys and values of the other layers too."""
    plan = Plan((Checkpoint(modules=("layers.0", "layers.2")),))
    step = record_script(tmp_path, _CACHE_JOB).step
    predicted = int(live_bytes(plan.transform(step)).during.max())
    write_plan(tmp_path / "plan.toml", plan)
    assert record(tmp_path, "--plan", "plan.toml", "job.py", name="under.memprof").peak == predicted
