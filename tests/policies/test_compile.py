"""Compiled modules: real compilation on this machine, and predictions that are measurements."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

from memprof.errors import PolicyError
from memprof.policies.compile.policy import FUSION, Compile
from memprof.policies.plan.plan import Plan
from memprof.policies.runtime.job import Job
from memprof.policies.swap.policy import Swap
from tests.policies.faces import recorded, train
from tests.recorder.recorded import record_script

JOB = """
import torch
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(10):
    model(torch.ones(4, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
HAS_COMPILER = shutil.which("g++") is not None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layers.*@much", "invalid activation budget"),
        ("@2", "share from 0 to 1"),
        ("a@-1", "share"),
        (".,fusion=-1", "invalid limit '-1' of fusion"),
    ],
)
def test_bad_flag_is_refused_with_a_sentence(text, words):
    """A budget that is not a share is refused with a valid example."""
    with pytest.raises(PolicyError, match=words):
        Compile.from_flag(text)


def test_flag():
    """--compile 'layers.*,head@0.5' names modules and a budget; '.' is the model."""
    assert Compile.from_flag("layers.*,head@0.5") == Compile(("layers.*", "head"), 0.5)
    assert Compile.from_flag(".") == Compile(("",), 1.0)
    assert Compile.from_flag(".@0.5,fusion=0") == Compile(("",), 0.5, 0.0)
    assert Compile.from_flag("layers.*@0.5").describe() == "compile layers.* at 0.5"


def test_unmeasured_plan_is_refused_with_the_way_to_measure():
    """Predicting requires a measurement; the error names the command that makes one."""
    step = recorded("lstm")
    with pytest.raises(PolicyError, match=r"memprof record --compile 'layers\.\*@0\.5' train\.py"):
        Compile(("layers.*",), 0.5).transform(step)
    with pytest.raises(PolicyError, match="is not there"):
        Compile(("layers.*",), measured="nowhere.memprof").transform(step)


def test_measured_run_is_the_prediction(tmp_path):
    """Given a recording of the plan, the prediction is its steady step; one of another model is refused."""
    path = tmp_path / "compiled.memprof"
    train("lstm", steps=4, record=path)
    step = recorded("lstm")
    predicted = Compile(("layers.*",), measured=str(path)).transform(step)
    assert list(predicted.ops.name) == list(step.ops.name)
    with pytest.raises(PolicyError, match="another model"):
        Compile(("layers.*",), measured=str(path)).transform(recorded("shared"))


def test_a_measured_run_includes_the_policies_it_was_recorded_under_and_no_others(tmp_path):
    """A plan that adds or leaves out a policy is refused: the measured step would be that of another plan."""
    swap = Swap(what="optimizer", to="disk")
    measured = record_script(tmp_path, JOB, "--stop", "--swap", "optimizer:disk", name="compiled.memprof")
    step = record_script(tmp_path, JOB, "--stop").step
    compiled = Compile(measured=str(measured.path))
    predicted = Plan((swap, compiled)).transform(step)
    assert list(predicted.ops.name) == list(measured.trace.fullest_step().ops.name)
    with pytest.raises(PolicyError, match=r"recorded under swap optimizer to disk before .*, this plan has no other"):
        Plan((compiled,)).transform(step)
    with pytest.raises(PolicyError, match="this plan has swap optimizer to host: record the job under the whole plan"):
        Plan((Swap(what="optimizer"), compiled)).transform(step)


def test_growth_by_fusion_is_limited_where_torch_can():
    """Torch 2.15 compiles under the limit, also what the job compiles itself; an older one refuses it by name."""
    from torch._inductor import config

    model, policy = nn.Sequential(nn.Linear(2, 2)), Compile(fusion_gb=0.5)
    job = Job(model)
    if not hasattr(config, FUSION):
        with pytest.raises(PolicyError, match=r"from 2\.15 on, and this is .*; leave out fusion_gb"):
            policy.apply(job)
        assert "forward" not in model.__dict__
        return
    policy.apply(job)
    assert getattr(config, FUSION) == 0.5
    job.undo()
    assert getattr(config, FUSION) is None


def test_pattern_without_module_is_refused():
    """A pattern that matches nothing is refused before anything is compiled."""
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(PolicyError, match="no module"):
        Compile(("layers.*",)).apply(Job(model))
    assert "forward" not in model[0].__dict__


@pytest.mark.skipif(not HAS_COMPILER, reason="there is no C++ compiler")
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize("budget", [0.1, pytest.param(1.0, marks=pytest.mark.slow)])
def test_compiled_training_is_the_same_within_rounding(budget):
    """A compiled module trains as before within rounding, also under a budget, and undo takes it back."""
    plain = train("shared")
    compiled = train("shared", Plan((Compile(("mixer.norm",), budget),)))
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-5)
    for key, value in plain.state.items():
        torch.testing.assert_close(compiled.state[key], value, rtol=1e-3, atol=1e-5)
    model = nn.Sequential(nn.Linear(2, 2))
    job = Job(model)
    Compile(("0",)).apply(job)
    job.undo()
    assert "forward" not in model[0].__dict__
