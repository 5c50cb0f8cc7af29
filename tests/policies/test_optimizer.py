"""Optimizers: when they update, in which form, and where their state is."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from memprof.errors import PolicyError
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.optimizer.updates import HostUpdates
from memprof.policies.plan.interval import interval_of
from memprof.policies.plan.plan import Plan
from memprof.policies.runtime.job import Job
from memprof.policies.swap.policy import Swap
from memprof.recorder.steps.usages import has_form
from memprof.replay.live import live_bytes
from memprof.trace.schema import TABLES
from memprof.trace.step import Step
from tests.policies import faces
from tests.policies.faces import compare, record_step, recorded, train, trained
from tests.recorder.recorded import record_script

HAS_EIGHT_BIT = any(importlib.util.find_spec(name) for name in ("torchao", "bitsandbytes"))


def peak(step: Step, phase: str = "") -> int:
    during = live_bytes(step).during
    return int(during[step.ops.phase == phase].max() if phase else during.max())


def small_job(kind=torch.optim.Adam, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, kind(model.parameters(), **settings)


@pytest.fixture
def applied():
    """Applies a policy to a model and an optimizer, and takes it back when the test is over."""
    jobs = []

    def apply(policy, model, optimizer):
        jobs.append(Job(model, [optimizer]))
        policy.apply(jobs[-1])
        return jobs[-1]

    yield apply
    for job in jobs:
        job.undo()


def backward(model) -> None:
    model(torch.ones(3, 4)).sum().backward()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "write at least one of"),
        ("fast", "unknown option 'fast'"),
        ("foreach,fused", "foreach and fused are incompatible"),
        ("8bit,host", "8bit and host are incompatible"),
        ("8bit,foreach", "state 8bit and loop foreach are incompatible"),
    ],
)
def test_bad_flag_is_refused_with_a_sentence(text, words):
    """An invalid flag is refused with a valid example."""
    with pytest.raises(PolicyError, match=words):
        OptimizerPolicy.from_flag(text)


def test_flag():
    """--optimizer in-backward,foreach sets both."""
    policy = OptimizerPolicy.from_flag("in-backward, foreach")
    assert policy == OptimizerPolicy(loop="foreach", in_backward=True)
    assert policy.describe() == "optimizer in-backward, foreach"


@pytest.mark.parametrize("policy", [OptimizerPolicy(in_backward=True), OptimizerPolicy(loop="foreach")])
def test_transform_leaves_its_input(policy):
    """The recorded step is what it was after a prediction from it, and the prediction contradicts nothing."""
    step = recorded("lstm")
    tables = [getattr(step, name) for name in ("ops", "storages", "uses", "saved", "module_calls")]
    copies = [table.take(slice(None)) for table in tables]
    policy.transform(step).check()
    for table, copy in zip(tables, copies, strict=True):
        for column in next(kind for kind in TABLES if type(table) is kind).columns():
            np.testing.assert_array_equal(getattr(table, column.name), getattr(copy, column.name))


@pytest.mark.parametrize(
    ("name", "text"),
    [("resnet", "in-backward"), ("shared", "in-backward,fused"), ("shared", "foreach"), ("shared", "fused")],
)
def test_estimate_is_within_its_bounds(name, text, monkeypatch):
    """Of one short sequence, so that updates make the peak where the policy does not free what they take."""
    job = faces.load_job(name)
    monkeypatch.setattr(job, "BATCH", 1)
    monkeypatch.setattr(job, "LENGTH", 8, raising=False)
    policy = OptimizerPolicy.from_flag(text)
    step, measured = record_step(name), record_step(name, Plan((policy,)))
    bounds = interval_of((policy,), (step,), (policy.transform(step),))
    assert bounds.least_bytes <= peak(measured) <= bounds.most_bytes, compare(policy.transform(step), measured)


def test_estimate_is_changed_by_other_policies():
    """What is in memory meanwhile is theirs to change."""
    early = OptimizerPolicy(in_backward=True)
    plans = Plan((Checkpoint(("mixer",)), early)), Plan((Swap(("mixer",), to="disk"), early))
    for plan in plans:
        predicted = plan.transform(recorded("shared"))
        predicted.check()
        assert peak(predicted) < peak(early.transform(recorded("shared")))


@pytest.mark.parametrize(
    ("name", "text"),
    [("gpt", "in-backward"), ("resnet", "in-backward"), ("shared", "in-backward,foreach"), ("lstm", "foreach")],
)
def test_training_is_the_same_to_the_bit(name, text):
    """Three steps in another order or with foreach give the plain run's parameters, bit by bit."""
    plain, changed = trained(name), train(name, Plan((OptimizerPolicy.from_flag(text),)))
    assert changed.losses == plain.losses
    assert all(torch.equal(changed.state[key], value) for key, value in plain.state.items())


@pytest.mark.parametrize("name", ["lstm"])
def test_fused_training_is_the_same_within_rounding(name):
    """A fused kernel rounds otherwise: after three steps no parameter is further off than 1e-5."""
    plain, changed = trained(name), train(name, Plan((OptimizerPolicy(loop="fused"),)))
    for key, value in plain.state.items():
        torch.testing.assert_close(changed.state[key], value, rtol=1e-4, atol=1e-5)


def test_gradients_are_gone_when_backward_returns(applied):
    """Step-in-backward frees each gradient; reading one is refused, and after the step it is None."""
    model, optimizer = small_job()
    applied(OptimizerPolicy(in_backward=True), model, optimizer)
    backward(model)
    for parameter in model.parameters():
        assert type(parameter.grad).__tensor_flatten__(parameter.grad) == ([], None)
        assert parameter.grad.shape == parameter.shape
        with pytest.raises(PolicyError, match="read or changed after backward: step-in-backward has already used"):
            parameter.grad.norm()
    optimizer.step()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_clipping_is_refused_at_the_call(applied):
    """Clipping gradients that are used already is refused, also through a name imported before; others' are clipped."""
    model, optimizer = small_job()
    job = applied(OptimizerPolicy(in_backward=True), model, optimizer)
    backward(model)
    with pytest.raises(PolicyError, match="clip_grad_norm_ was called: step-in-backward cannot clip"):
        clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(PolicyError, match="clip_grad_value_ was called"):
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    clip_grad_norm_(other.parameters(), 1e-3)
    assert other.weight.grad.norm() < 1e-2
    job.undo()
    backward(model)
    clip_grad_norm_(model.parameters(), 1.0)


def test_gradients_changed_in_a_hook_of_the_step_are_refused(applied):
    """A job's hook before the step halves its gradients: it must not find that there are none, and halve nothing."""
    model, optimizer = small_job()

    def halve(stepped, *_):
        for parameter in stepped.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    applied(OptimizerPolicy(in_backward=True), model, optimizer)
    backward(model)
    with pytest.raises(PolicyError, match="read or changed after backward"):
        optimizer.step()


@pytest.mark.parametrize(
    "access",
    [
        lambda model, optimizer: optimizer.state[model[0].weight]["exp_avg"],
        lambda model, optimizer: len(optimizer.state),
        lambda model, optimizer: optimizer.state_dict(),
        lambda model, optimizer: (model[0].weight.detach().mul_(0.9), optimizer.step()),
        lambda model, optimizer: (optimizer.register_step_pre_hook(lambda o, *_: list(o.state)), optimizer.step()),
    ],
    ids=["entry", "length", "state_dict", "decayed weights", "hook"],
)
def test_access_between_backward_and_step_is_refused(access, applied):
    """There the state, and weights decayed by hand, are those of the next step; after the step they are right."""
    model, optimizer = small_job(lr=0.1)
    job = applied(OptimizerPolicy(in_backward=True), model, optimizer)
    for _ in range(2):
        backward(model)
        optimizer.step()
        assert len(optimizer.state_dict()["state"]) == len(optimizer.state) == 4
        optimizer.zero_grad()
    backward(model)
    with pytest.raises(PolicyError, match=r"accessed between backward and optimizer.step\(\)"):
        access(model, optimizer)
    job.undo()
    assert optimizer.state[model[0].weight]["step"] == 3


@pytest.mark.parametrize(
    ("kind", "settings", "policy", "words"),
    [
        (torch.optim.Adam, {}, OptimizerPolicy(state="host"), "host changes nothing"),
        (torch.optim.LBFGS, {}, OptimizerPolicy(in_backward=True), "cannot update one parameter at a time"),
        (torch.optim.RMSprop, {}, OptimizerPolicy(loop="fused"), "RMSprop has no fused form"),
        (torch.optim.LBFGS, {}, OptimizerPolicy(loop="foreach"), "LBFGS has no foreach form"),
    ],
)
def test_what_does_not_fit_is_refused(kind, settings, policy, words):
    """An optimizer that cannot do what is asked is refused before anything is changed."""
    model, optimizer = small_job(kind, **settings)
    before = dict(optimizer.param_groups[0])
    with pytest.raises(PolicyError, match=words):
        policy.apply(Job(model, [optimizer]))
    assert dict(optimizer.param_groups[0]) == before
    assert not model[0].weight._post_accumulate_grad_hooks


def test_without_an_optimizer_it_is_refused():
    """There must be an optimizer to change."""
    with pytest.raises(PolicyError, match="the optimizer policy needs an optimizer"):
        OptimizerPolicy(loop="foreach").apply(Job(nn.Linear(2, 2)))


@pytest.mark.skipif(HAS_EIGHT_BIT, reason="an 8-bit library is installed")
def test_missing_library_is_named():
    """Without an 8-bit library the sentence says what to install."""
    model, optimizer = small_job()
    with pytest.raises(PolicyError, match="pip install torchao"):
        OptimizerPolicy(state="8bit").apply(Job(model, [optimizer]))


def test_eight_bit_state_is_predicted_smaller():
    """State of 4,096 numbers or more in blocks of 256 is predicted at a byte a number, a scale a block and a table."""
    step = recorded("lstm")
    predicted = OptimizerPolicy(state="8bit").transform(step)
    one = np.flatnonzero(predicted.storages.name == "predict.weight.exp_avg")[0]
    numbers = 400 * 64
    assert predicted.storages.allocated_bytes[one] == numbers + numbers // 256 * 4 + 1024
    assert peak(predicted) < peak(step)


@pytest.mark.gpu
def test_state_is_in_host_memory_between_steps():
    """State is moved to the host after each parameter's update, and back when the plan is undone."""
    ends = []
    for policy in (None, OptimizerPolicy(state="host")):
        torch.manual_seed(0)
        model = nn.Linear(4, 4).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        job = Job(model, [optimizer])
        if policy:
            policy.apply(job)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4, device="cuda")).sum().backward()
            optimizer.step()
            kinds = {state["exp_avg"].device.type for state in optimizer.state.values()}
            assert kinds == ({"cpu"} if policy else {"cuda"})
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
        job.undo()
        assert {state["exp_avg"].device.type for state in optimizer.state.values()} == {"cuda"}
        assert type(optimizer) is torch.optim.AdamW
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_one_parameter_at_a_time_is_the_same():
    """Updating parameters one by one in the optimizer's own step, as host state does, keeps hooks and bits."""
    ends = []
    for is_single in (False, True):
        model, optimizer = small_job(torch.optim.AdamW, lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        steps, job = [], Job(model, [optimizer])
        optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        if is_single:
            HostUpdates(optimizer).prepare(job)
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            scheduler.step()
        assert len(steps) == 3
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
        job.undo()
        assert type(optimizer) is torch.optim.AdamW
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_host_state_is_predicted_away():
    """On a device the state's bytes are gone but for the parameter under way."""
    step = recorded("lstm")
    with pytest.raises(PolicyError, match="host changes nothing"):
        OptimizerPolicy(state="host").transform(step)
    storages = step.storages.replace(device=np.full(len(step.storages), "cuda:0", dtype=np.object_))
    on_device = Step(**{**vars(step), "storages": storages})
    predicted = OptimizerPolicy(state="host").transform(on_device)
    is_moved = (storages.category == "optimizer_state") & (storages.shape != "")
    saved = int(storages.allocated_bytes[is_moved].sum())
    assert peak(on_device) - peak(predicted) == saved
    largest = int(storages.allocated_bytes[storages.category == "parameter"].max())
    assert peak(predicted, "optimizer") <= peak(on_device, "optimizer") - saved + 2 * largest


def test_undo_restores(applied):
    """After undo the optimizer's form and type are as before, and backward keeps its gradients."""
    model, optimizer = small_job()
    before = dict(optimizer.param_groups[0])
    job = applied(OptimizerPolicy(loop="fused", in_backward=True), model, optimizer)
    assert optimizer.param_groups[0]["fused"] is True
    backward(model)
    optimizer.step()
    job.undo()
    assert dict(optimizer.param_groups[0]) == before
    backward(model)
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()


def test_accumulated_steps_are_not_predicted():
    """A step that accumulates, or uses its gradients before the update, cannot be predicted in backward."""
    step = recorded("lstm")
    micro_batch = step.ops.micro_batch.copy()
    micro_batch[-1] = 1
    with pytest.raises(PolicyError, match="a second backward ran before"):
        OptimizerPolicy(in_backward=True).transform(
            Step(**{**vars(step), "ops": step.ops.replace(micro_batch=micro_batch)})
        )


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    ("early", "late", "is_refused"),
    [
        ("", "weights().norm(); momenta().norm()", False),
        ("weights().norm()", "", True),
        ("weights().mul_(0.9)", "", True),
        ("momenta().norm()", "", True),
    ],
)
def test_access_between_backward_and_step_is_not_predicted(foreach, early, late, is_refused, tmp_path):
    """Weights read or decayed, and state read, before the step: the run would give those of the next step."""
    script = f"""
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach={foreach})
weights = lambda: model[0].weight.detach()
momenta = lambda: optimizer.state[model[0].weight].get("momentum_buffer", torch.ones(2))
for step in range(5):
    model(torch.ones(2, 64)).sum().backward()
    {early}
    optimizer.step()
    {late}
    optimizer.zero_grad()
"""
    step = record_script(tmp_path, script).step
    if is_refused:
        with pytest.raises(PolicyError, match=r"accessed between backward and optimizer.step\(\)"):
            OptimizerPolicy(in_backward=True).transform(step)
    else:
        OptimizerPolicy(in_backward=True).transform(step)


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.cpu(),
        lambda model: model.double(),
        lambda model: model.to("cpu", torch.float64),
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: model.to("meta"),
    ],
)
def test_a_model_is_moved_and_cast_with_its_used_gradients(move):
    """Moving or casting a model after backward, as trainers do when they end, works, and its gradients stay used."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 2))
    job = Job(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    OptimizerPolicy(in_backward=True).apply(job)
    model(torch.ones(1, 1, 4, 4)).sum().backward()
    move(model)
    for parameter in model.parameters():
        assert parameter.grad.shape == parameter.shape
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.device == parameter.device
        with pytest.raises(PolicyError, match="has already used"):
            parameter.grad.sum()
    job.undo()


class _Ends(torch.optim.Adam):
    """Ends in torch's own step."""

    def step(self, closure=None):
        return super().step(closure)


class _Own(torch.optim.Adam):
    """Updates in code of its own."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad)


def updated(optimizer, parameter, gradient):
    for _ in range(3):
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach().clone()


LAYOUTS = {
    "as the parameter's": lambda: torch.randn(40, 33),
    "transposed": lambda: torch.randn(33, 40).t(),
    "expanded": lambda: torch.randn(1, 33).expand(40, 33),
    "with gaps": lambda: torch.randn(40, 66)[:, ::2],
    "sparse": lambda: torch.eye(40, 33).to_sparse(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_no_gradient_is_misread_on_the_cpu(kind, layout, applied):
    """torch's fused kernels read every gradient as if it lay as its parameter does: others are updated in a loop.

    A recording of such a job has no fused form, so that none is proposed.
    """
    if kind is torch.optim.AdamW and layout == "sparse":
        pytest.skip("AdamW takes no sparse gradients in any form")
    results = []
    for policy in (None, OptimizerPolicy(loop="fused")):
        torch.manual_seed(0)
        model = nn.Linear(33, 40, bias=False)
        optimizer = kind(model.parameters(), lr=0.1)
        job = applied(policy, model, optimizer) if policy else None
        results.append(updated(optimizer, model.weight, LAYOUTS[layout]()))
    torch.testing.assert_close(*results)
    assert has_form(optimizer, "fused") is (layout == "as the parameter's")
    assert optimizer.param_groups[0]["fused"] is (layout == "as the parameter's")
    assert len(job.notes) == (layout != "as the parameter's")


def test_fused_updates_go_on_after_a_checkpoint_is_loaded(applied):
    """Its groups have the settings of the run that saved it; the plan's form stays in force."""
    model, optimizer = small_job(torch.optim.AdamW)
    saved = optimizer.state_dict()
    applied(OptimizerPolicy(loop="fused"), model, optimizer)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["fused"] is None
    backward(model)
    optimizer.step()
    assert optimizer.param_groups[0]["fused"] is True


@pytest.mark.parametrize(
    ("kind", "settings", "dtype", "has_fused"),
    [
        (torch.optim.Adam, {"amsgrad": True, "maximize": True}, torch.float32, True),
        (torch.optim.Adam, {"lr": torch.tensor(0.1)}, torch.float32, True),
        (torch.optim.Adam, {}, torch.bfloat16, True),
        (_Ends, {}, torch.float32, True),
        (_Own, {}, torch.float32, False),
        (torch.optim.SGD, {}, torch.float16, False),  # the kernel changes next to nothing
        (torch.optim.SGD, {}, torch.bfloat16, False),
        (torch.optim.Adam, {}, torch.complex64, False),
        (torch.optim.Adam, {"differentiable": True}, torch.float32, False),
        (torch.optim.RMSprop, {}, torch.float32, False),
    ],
)
def test_what_has_a_fused_form(kind, settings, dtype, has_fused):
    """What torch refuses, or its kernels do not update, has none: in recordings and in runs."""
    model = nn.Linear(3, 3).to(dtype)
    optimizer = kind(model.parameters(), **settings)
    assert has_form(optimizer, "fused") is has_fused
    if has_fused:
        job = Job(model, [optimizer])
        OptimizerPolicy(loop="fused").apply(job)
        job.undo()
        assert has_form(optimizer, "fused")
        return
    with pytest.raises(PolicyError, match="fused"):
        OptimizerPolicy(loop="fused").apply(Job(model, [optimizer]))


def test_fused_updates_are_proposed_on_the_cpu():
    """Adam's temporaries are the peak of the shared job: a fused kernel needs none, in backward or after it."""
    loops = [policy.loop for policy in OptimizerPolicy.candidates(recorded("shared")).whole_step]
    assert loops == ["fused", "fused", "", "loop"]
